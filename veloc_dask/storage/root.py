"""The root of a version: a small canonical JSON document that says what the version consists of.

It holds the structure of the saved value, what each item needs to be rebuilt (never pickled futures, never tokens), and the
sha256 of every table segment and ``zarr.json``; its own body is covered by a sha256 too. A tombstone is a root that says that
its version will never exist. Nothing here does I/O, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec

from veloc_dask.storage import layout, zarr_view
from veloc_dask.storage.blocks import ItemSpec
from veloc_dask.storage.errors import IntegrityError

FORMAT = "veloc_dask"
FORMAT_VERSION = 1
MAX_ROOT_NBYTES = 64 << 20
KINDS = frozenset({"array", "frame", "bag", "delayed", "future", "object", "meta"})  # meta describes another item
_MAX_NDIM = 64  # numpy's; the product of a million dimensions would take hours


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collection or object inside a version."""

    kind: str  # one of KINDS
    spec: ItemSpec
    recipe: dict[str, Any] = {}  # what `kind` needs to be rebuilt; JSON
    view: bool = True  # whether zarr.json describes its files (False: only the block table does)


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the block table."""

    path: str
    node: str  # the node whose blocks it lists, "" for blocks that only the remote tier holds
    nrows: int
    nbytes: int
    sha256: str


class Root(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="version"):
    """What a version consists of."""

    format: str
    format_version: int
    name: str
    version: int
    attempt: str
    run: int | None  # None in the node-local root of a version that was not committed yet
    run_uuid: str
    created: str  # for people; nothing is ordered by it
    structure: Any
    items: list[Item]
    segments: list[Segment]
    documents: dict[str, str]  # path of each zarr.json -> sha256
    nblocks: int
    nbytes: int

    @property
    def directory(self) -> str:
        return layout.attempt_name(self.version, self.attempt)


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="tombstone"):
    """Takes the place of a root so that a dead attempt can never commit."""

    format: str
    format_version: int
    name: str
    version: int
    run: int  # of the collector


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: msgspec.Raw
    sha256: str


class _Header(msgspec.Struct, frozen=True):
    format: str
    format_version: int


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def encode(root: Root | Tombstone) -> bytes:
    """Canonical bytes: sorted keys, no spaces, a checksum of the body beside it."""
    body = msgspec.json.encode(root, order="sorted")
    return msgspec.json.encode({"body": msgspec.Raw(body), "sha256": sha256(body)}, order="sorted")


def decode(data: Any, *, where: str) -> Root | Tombstone:
    """Parse and check a root; IntegrityError says what is wrong with it, `where` says which one."""
    view = memoryview(data)
    if view.nbytes > MAX_ROOT_NBYTES:
        raise IntegrityError(f"{where}: expected a root of at most {MAX_ROOT_NBYTES} bytes, found {view.nbytes}")
    try:
        envelope = msgspec.json.decode(view, type=_Envelope)
        if sha256(bytes(envelope.body)) != envelope.sha256:
            raise IntegrityError(f"{where}: its checksum does not match; the file is torn or was changed")
        header = msgspec.json.decode(envelope.body, type=_Header)
        if header.format != FORMAT:
            raise IntegrityError(f"{where}: expected format {FORMAT!r}, found {header.format!r}")
        if header.format_version != FORMAT_VERSION:
            raise IntegrityError(
                f"{where}: written in format version {header.format_version}, this veloc_dask reads version {FORMAT_VERSION}; "
                "install the release that wrote it, or a newer one"
            )
        root: Root | Tombstone = msgspec.json.decode(envelope.body, type=Root | Tombstone)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not a root of veloc_dask ({error}); the file is torn or was changed") from error
    if not 0 <= root.version <= layout.MAX_VERSION:
        raise IntegrityError(f"{where}: expected a version from 0 to {layout.MAX_VERSION}, found {root.version}")
    if isinstance(root, Root):
        if layout.parse_attempt(root.directory) is None:
            raise IntegrityError(f"{where}: {root.attempt!r} is not an attempt")
        for item in root.items:
            if item.kind not in KINDS:
                raise IntegrityError(
                    f"{where}: item {item.spec.path!r} is of a kind, {item.kind!r}, that is not known here"
                )
            grid = item.spec.grid
            if item.spec.form not in ("array", "blocks") or len(grid) > _MAX_NDIM or min(grid, default=0) < 0:
                raise IntegrityError(
                    f"{where}: item {item.spec.path!r} has a form or a grid that this veloc_dask does not know"
                )
        for path in [*root.documents, *(s.path for s in root.segments), *(i.spec.path for i in root.items)]:
            layout.check_object(path)
        sizes = [root.nblocks, root.nbytes, root.run or 0]
        sizes += [n for s in root.segments for n in (s.nrows, s.nbytes)]
        sizes += [n for i in root.items for n in (*i.spec.grid, *i.spec.shape, *i.spec.chunk)]
        if min(sizes) < 0:
            raise IntegrityError(f"{where}: a negative size; the root is not trustworthy")
        blocks = sum(math.prod(item.spec.grid) for item in root.items)
        if not blocks == root.nblocks == sum(s.nrows for s in root.segments):
            raise IntegrityError(f"{where}: its items do not have {root.nblocks} blocks; the root was changed")
    return root


def documents(items: list[Item], attributes: dict[str, Any]) -> dict[str, bytes]:
    """The ``zarr.json`` files of a version, by path: a group, its subgroups, an array per item that has a view."""
    found = {"zarr.json": zarr_view.group_json(attributes)}
    for item in items:
        parts = item.spec.path.split("/")
        for depth in range(1, len(parts)):
            found["/".join(parts[:depth]) + "/zarr.json"] = zarr_view.group_json()
        if item.view:
            found[f"{item.spec.path}/zarr.json"] = zarr_view.array_json(item.spec)
    return found
