"""The client's half of a restore: root and table become load tasks, collections and plain objects."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from veloc_dask import collections
from veloc_dask.errors import IntegrityError, VelocError
from veloc_dask.scheduler_plugin import internals, load_block, messages
from veloc_dask.storage import reader, table
from veloc_dask.storage import root as roots
from veloc_dask.storage.reader import BlockRef

if TYPE_CHECKING:
    from veloc_dask.checkpointer import Checkpointer

READS_AT_ONCE = 16


async def rebuild(checkpointer: Checkpointer, found: dict[str, Any], select: Sequence[str] | None) -> Any:
    """The saved value from what `catalog.fetch` found: collections of load tasks, futures, and plain objects."""
    root = roots.decode(found["root"], where=f"root of {checkpointer.name!r} {found['directory']}")
    assert isinstance(root, roots.Root)
    what = f"{checkpointer.name!r} version {root.version}"
    refs = await asyncio.to_thread(block_refs, root, found["segments"], what=what)
    try:
        structure = collections.select_nodes(root.structure, select, what)
        needed = collections.items_in(structure, root.items)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, VelocError):
            raise
        raise IntegrityError(
            f"{what}: its root has no structure ({type(error).__name__}: {error}); it was changed"
        ) from error
    plain = await _read_plain(checkpointer, root, refs, needed, what)

    lease = Lease(found["lease"])
    _release_with(checkpointer, lease)

    def task(key: Any, item: int, position: int) -> Any:
        return internals.load_task(key, load_block, [refs[item][position]], "", lease)

    assembler = collections.Assembler(root.items, f"veloc-load-{lease.id}", task, plain, checkpointer.client)
    try:
        return assembler.build(structure)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise IntegrityError(
            f"{what}: its root does not describe what it holds ({type(error).__name__}: {error}); it was changed, or written by "
            "another program"
        ) from error


class Lease:
    """Lives for as long as a load task of a restored graph does in this process, in whatever graph Dask has put it.

    It stays here: what is sent to the cluster holds None in its place.
    """

    def __init__(self, lease_id: str) -> None:
        self.id = lease_id

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def __dask_tokenize__(self) -> str:
        return self.id


def block_refs(root: roots.Root, segments: dict[str, bytes], *, what: str) -> dict[int, list[bytes]]:
    """Per item, the encoded reference of each block in C order of its grid; IntegrityError if one is missing."""
    numbers = {item.spec.path: n for n, item in enumerate(root.items)}
    refs = {n: [b""] * int(np.prod(item.spec.grid, dtype=np.int64)) for n, item in enumerate(root.items)}
    for segment in root.segments:
        data = segments.get(segment.path, b"")
        if len(data) != segment.nbytes or roots.sha256(data) != segment.sha256:
            raise IntegrityError(
                f"{what}: table segment {segment.path} does not match its root (expected {segment.nbytes} bytes, found "
                f"{len(data)}); verify the version, or restore another one"
            )
        rows = table.decode_segment(data)
        if len(rows) != segment.nrows:
            raise IntegrityError(f"{what}: {segment.path} has {len(rows)} rows, its root says {segment.nrows}")
        for row in rows:
            spec = root.items[numbers[row.item]].spec if row.item in numbers else None
            if spec is None or len(row.index) != len(spec.grid):
                raise IntegrityError(f"{what}: the table lists a block {row.index} of unknown item {row.item!r}")
            if any(i >= g for i, g in zip(row.index, spec.grid, strict=True)):
                raise IntegrityError(f"{what}: block {row.index} is outside of item {row.item!r}")
            position = int(np.ravel_multi_index(row.index, spec.grid)) if spec.grid else 0
            nodes = (segment.node,) if segment.node else ()
            # the remote tier is asked as well if the version was not committed there: a block that had been flushed is as good
            ref = BlockRef(root.name, root.directory, table.encode_row(row), spec, nodes, remote=True)
            if refs[numbers[row.item]][position]:
                raise IntegrityError(f"{what}: the table lists block {row.index} of item {row.item!r} twice")
            refs[numbers[row.item]][position] = messages.encode(ref)
    for number, blocks in refs.items():
        if not all(blocks):
            raise IntegrityError(
                f"{what}: the table misses block {blocks.index(b'')} of item {root.items[number].spec.path!r}; "
                "restore another version"
            )
    return refs


async def _read_plain(
    checkpointer: Checkpointer, root: roots.Root, refs: dict[int, list[bytes]], needed: set[int], what: str
) -> dict[int, Any]:
    """The plain objects among the needed items, decoded here."""
    numbers = [n for n in sorted(needed) if root.items[n].kind in ("object", "meta")]
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(number: int) -> Any:
        ref = messages.decode(refs[number][0], BlockRef)
        async with gate:
            reply = await checkpointer._ask("veloc_read_stored", ref=refs[number][0])
        stored = np.frombuffer(bytearray(reply["data"]), np.uint8)
        try:
            return reader.decode(table.decode_row(ref.row), ref.spec, stored, allow_pickle=reply["allow_pickle"])
        except VelocError:
            raise
        except Exception as error:
            raise VelocError(
                f"item {ref.spec.path!r} of {what} cannot be rebuilt: {type(error).__name__}: {error}; make its class "
                "importable here, or leave the item out with select="
            ) from error

    return dict(zip(numbers, await asyncio.gather(*(read(n) for n in numbers)), strict=True))


def _release_with(checkpointer: Checkpointer, lease: Lease) -> None:
    """Tell the scheduler when no load task of this restore exists in this process any more."""
    lease_id = lease.id
    reference = weakref.ref(checkpointer)

    def gone() -> None:
        alive = reference()
        if alive is not None and alive.client.status == "running":
            alive._loop_call(lambda: alive._background(alive._release(lease_id)))

    weakref.finalize(lease, gone).atexit = False
