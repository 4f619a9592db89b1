"""A block comes back: the nearest copy that can be read and verified.

Copies are tried in the order given (this node's tiers, a peer, the remote tier). Each is verified before it is decoded; one
that is damaged is set aside, so that it is not tried again, and the next one is taken. What cannot be decoded for another
reason (a class that cannot be imported) is no damage: the error goes to the caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from veloc_dask.storage import blocks, files
from veloc_dask.storage.errors import BlockLost, IntegrityError
from veloc_dask.storage.remote import Remote, retried
from veloc_dask.storage.table import Row
from veloc_dask.storage.tiers import Node, block_path

logger = logging.getLogger("veloc_dask")

Bytes = npt.NDArray[np.uint8]


class BlockRef(msgspec.Struct, frozen=True):
    """All that is needed to read one block, wherever its copies are."""

    name: str  # checkpoint
    directory: str  # of the attempt (or of protected blocks)
    row: bytes  # encoded table.Row
    spec: blocks.ItemSpec
    nodes: tuple[str, ...] = ()  # uuids of the nodes that hold a copy
    remote: bool = False  # whether the remote tier has a copy


class Copy(msgspec.Struct, frozen=True):
    """One place where a block may be read."""

    label: str
    read: Callable[[], Bytes]
    set_aside: Callable[[], None] | None = None


def local_copies(node: Node, name: str, directory: str, row: Row) -> Iterator[Copy]:
    """The copies on this node's tiers."""
    for tier, path in node.copies(block_path(name, directory, row.object)):

        def read(path: str = path, home: str = tier.home) -> Bytes:
            return files.read(path, offset=row.offset, length=row.stored_nbytes, base=home)

        def set_aside(path: str = path) -> None:
            directory, entry = os.path.split(path)
            os.rename(path, os.path.join(directory, f".bad-{entry}"))

        yield Copy(f"tier {tier.path}", read, set_aside)


def remote_copy(remote: Remote, name: str, directory: str, row: Row) -> Copy:
    path = block_path(name, directory, row.object)

    def get() -> Bytes:
        try:
            return remote.get(path, offset=row.offset, length=row.stored_nbytes)
        except FileNotFoundError as error:
            raise IntegrityError(f"{path}: is missing") from error  # no second try will find it

    return Copy(f"remote {remote.label}", lambda: retried(get, f"reading from {remote.label}"))


def read_verified(row: Row, copies: Iterable[Copy], *, what: str) -> Bytes:
    """The stored bytes of a block from the first copy that passes its checksum; BlockLost if none does."""
    failures = []
    for copy in copies:
        try:
            stored = copy.read()
            blocks.verify(stored, object=row.object, stored_nbytes=row.stored_nbytes, crc32c=row.crc32c)
        except IntegrityError as error:
            failures.append(f"{copy.label}: {error}")
            logger.warning("%s: a damaged copy on %s is set aside: %s", what, copy.label, error)
            if copy.set_aside is not None:
                try:
                    copy.set_aside()
                except OSError as aside:
                    logger.warning("%s: it could not be set aside: %s", what, aside)
        except OSError as error:
            failures.append(f"{copy.label}: {error}")
        else:
            return stored
    tried = "; ".join(failures) or "it is on no tier that can be reached from here"
    raise BlockLost(f"{what}: no readable copy of {row.object} is left ({tried})")


def decode(row: Row, spec: blocks.ItemSpec, stored: Bytes, *, allow_pickle: bool) -> Any:
    return blocks.decode(
        stored,
        object=row.object,
        encoding=row.encoding,
        dtype=row.dtype,
        shape=row.shape,
        order=row.order,
        nbytes=row.nbytes,
        stored_nbytes=row.stored_nbytes,
        crc32c=row.crc32c,
        item=spec,
        allow_pickle=allow_pickle,
    )
