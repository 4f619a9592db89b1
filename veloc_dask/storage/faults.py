"""Named points where a test can make storage fail: the process killed, a call failing, a delay, a torn file.

In production nothing is armed and a point costs one look at an empty dict. Only code arms a point, never an environment
variable or a configuration: nobody can hurt a running job with it. The actions lie in ``veloc_dask.testing``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

POINTS: dict[str, str] = {
    "file.opened": "the temporary file exists and is empty",
    "file.written": "all bytes are written, none is synced",
    "file.before_rename": "the temporary file is complete and, if that was asked for, synced",
    "file.after_rename": "the file has its name; its directory entry is not synced",
    "file.synced": "file and directory entry are durable; the caller does not know yet",
    "commit.documents": "blocks, table and zarr.json files are durable",
    "commit.fenced": "the run was found to be the newest; the root does not exist yet",
    "commit.created": "the version exists; the caller does not know yet",
    "retention.noted": "a note or tombstone keeps a dead attempt from committing; its files are there",
    "retention.hidden": "a version is out of the listings; its files are there",
    "retention.renamed": "a directory has lost its name; its files are there",
    "retention.deleted": "the files of one directory are gone",
    "retention.local_hidden": "a version is out of a node's listings; its files are there",
    "tier.reserved": "the bytes of a block are reserved on the board, nothing is written",
    "tier.before_settle": "the file of a block is complete; the board still has its bytes as reserved",
}

armed: dict[str, Callable[..., None]] = {}


def fault_point(name: str, **context: Any) -> None:
    """Run what a test has armed for this point; it may raise, wait or never return."""
    if armed:
        action = armed.get(name)
        if action is not None:
            action(**context)
