"""One version, from the order to capture its blocks to its commit. Lives on the scheduler, does no I/O itself.

A `Save` is the state (what is known of each block), `SaveDriver` the one task that moves it on: capture, seal (the table and
a root on every node: level ``local``), flush, commit (level ``durable``), retention. Each block goes

    WANTED -> ORDERED -> CAPTURED -> FLUSHED

and back to WANTED when the worker that was to capture it dies, or the node that held it is lost before the flush. A save fails
as a whole, with the cause; up to level ``local`` it then leaves nothing behind, afterwards the local version stays.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from veloc_dask.scheduler_plugin import internals, messages
from veloc_dask.scheduler_plugin.internals import Key
from veloc_dask.storage import layout, table
from veloc_dask.storage import root as roots
from veloc_dask.storage.errors import BlockLost, TierError, VelocError, VersionExists
from veloc_dask.storage.reader import BlockRef
from veloc_dask.storage.root import Item

if TYPE_CHECKING:
    from veloc_dask.scheduler_plugin.space import Space

logger = logging.getLogger("veloc_dask")

SEAL_TRIES = 3
ORDER_BATCH = 256  # blocks in one message to a worker


class BlockState(enum.IntEnum):
    WANTED = 0
    ORDERED = 1
    CAPTURED = 2
    FLUSHED = 3


class Level(enum.IntEnum):
    PENDING = 0
    LOCAL = 1
    PROTECTED = 2
    DURABLE = 3


class Save:
    """State of one version under way (or ended). Blocks are numbered from 0 in the order of the items."""

    def __init__(self, space: Space, version: int, structure: Any, items: list[Item]) -> None:
        self.space = space
        self.version = version
        self.attempt = uuid.uuid4().hex
        self.directory = layout.attempt_name(version, self.attempt)
        self.structure = structure
        self.items = items
        self.keys: list[Key] = []
        self.item_of: list[int] = []
        self.index_of: list[tuple[int, ...]] = []
        self.states = bytearray()
        self.rows: list[bytes] = []
        self.nodes: list[str] = []
        self.workers: list[str] = []  # who captures, later who flushes, a block
        self.misses: dict[int, int] = {}  # how often a worker that was to capture a block did not have it
        self.plain: dict[int, bytes] = {}  # block number -> encoded FrozenBlock, for plain objects
        self.nblocks = 0  # once it has ended, when the keys may go
        self.captured = self.flushed = self.nbytes = self.flushed_nbytes = 0
        self.level = Level.PENDING
        self.error: VelocError | None = None
        self.settled = False  # its last level is reached: retention may take it
        self.done = False
        self.seen = 0  # counts changes, for those who wait
        self.client = f"veloc-{self.attempt}"

    def add_blocks(self, item: int, keys: Iterable[Key]) -> Iterator[int]:
        """Append the blocks of an item, in C order of its grid; yields their numbers."""
        for key, index in zip(keys, itertools.product(*map(range, self.items[item].spec.grid)), strict=True):
            number = len(self.keys)
            self.keys.append(key)
            self.item_of.append(item)
            self.index_of.append(index)
            self.states.append(BlockState.WANTED)
            self.rows.append(b"")
            self.nodes.append("")
            self.workers.append("")
            yield number

    def describe(self, number: int) -> str:
        item = self.items[self.item_of[number]]
        return f"{self.space.name!r} version {self.version}, item {item.spec.path!r}, block {self.index_of[number]}"

    def ref(self, number: int) -> BlockRef:
        return BlockRef(
            self.space.name,
            self.directory,
            self.rows[number],
            self.items[self.item_of[number]].spec,
            (self.nodes[number],) if self.nodes[number] else (),
            self.states[number] == BlockState.FLUSHED,
        )

    def status(self) -> messages.Status:
        return messages.Status(
            self.attempt,
            self.version,
            self.level.name.lower(),
            self.done,
            None if self.error is None else messages.describe_error(self.error),
            self.nblocks or len(self.keys),
            self.captured,
            self.flushed,
            self.nbytes,
            self.flushed_nbytes,
        )

    def notify(self) -> None:
        self.seen += 1
        self.space.changed()

    def set_captured(self, number: int, row: bytes, node: str, nbytes: int) -> bool:
        """A block is on a tier. False if that was known (a message came twice, or a block was ordered twice)."""
        if self.done or self.states[number] >= BlockState.CAPTURED:
            return False
        self.rows[number] = row
        self.nodes[number] = node
        self.states[number] = BlockState.CAPTURED
        self.captured += 1
        self.nbytes += nbytes
        self.plain.pop(number, None)
        if not node:
            self.set_flushed(number, nbytes)
        return True

    def set_flushed(self, number: int, nbytes: int) -> bool:
        if self.done or self.states[number] != BlockState.CAPTURED:
            return False
        self.states[number] = BlockState.FLUSHED
        self.flushed += 1
        self.flushed_nbytes += nbytes
        return True

    def end(self) -> None:
        """Nothing more will happen: of what a large version takes in memory only its keys are still needed."""
        self.done = True
        self.nblocks = len(self.keys)
        self.plain.clear()
        self.item_of, self.index_of, self.rows, self.nodes, self.workers = [], [], [], [], []
        self.structure, self.items = None, []

    def set_lost(self, number: int, nbytes: int) -> None:
        """The only copy of a captured block is gone before it was flushed."""
        assert self.states[number] == BlockState.CAPTURED
        self.states[number] = BlockState.WANTED
        self.captured -= 1
        self.nbytes -= nbytes
        self.rows[number] = b""
        self.nodes[number] = self.workers[number] = ""


class SaveDriver:
    """Moves one save from level to level."""

    flushes = True  # whether its blocks go on to the remote tier
    pins = True  # whether it keeps its keys alive until they are captured

    def __init__(self, save: Save) -> None:
        self.save = save
        self.space = save.space
        self.task: asyncio.Task[None] | None = None
        self._flush_error: VelocError | None = None
        self._committing = False
        self._wake = asyncio.Event()

    def start(self) -> None:
        self.task = asyncio.create_task(self._run(), name=f"veloc-save-{self.save.directory}")

    def progressed(self) -> None:
        self._wake.set()
        self.save.notify()

    def fail(self, error: VelocError) -> None:
        """Something that the save cannot survive happened outside of the driver."""
        if self.save.error is None and not self.save.done:
            self.save.error = error
            self._wake.set()

    def flush_failed(self, error: VelocError) -> None:
        """The remote tier did not take a block: the version can still become ``local``, and no more than that."""
        if self._flush_error is None:
            self._flush_error = error
            self._wake.set()

    def _all_captured(self) -> bool:
        return self.save.captured == len(self.save.keys)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while True:
            if self.save.error is not None:
                raise self.save.error
            if reached():
                return
            self._wake.clear()
            await self._wake.wait()

    async def _run(self) -> None:
        save = self.save
        try:
            await self._until(self._all_captured)
            self._unpin()
            await self._seal()
            if self.space.config.remote is not None:
                await self._flush_and_commit()
        except asyncio.CancelledError:
            save.error = save.error or VelocError(
                f"{save.space.name!r} version {save.version}: the scheduler closed before it was complete"
            )
        except VelocError as error:
            await self._failed(error)
        except Exception as error:
            logger.exception("saving %s version %s failed unexpectedly", save.space.name, save.version)
            await self._failed(VelocError(f"{type(error).__name__}: {error}"))
        finally:
            self._unpin()
            self.space.ended(save)
            save.notify()

    async def _seal(self) -> None:
        """Write table and root to every node that holds blocks: level ``local``."""
        save = self.save
        for attempt in range(SEAL_TRIES):
            try:
                if self.space.config.local:  # else all blocks are on the remote tier already
                    root = roots.encode(await self._write_table(run=None))
                    for node in sorted(set(save.nodes)) or [""]:
                        await self.space.nodes.call(node, "write_root", root=root)
                break
            except BlockLost:
                # a node went before it had its part of the table: its blocks are captured again, or the save has failed
                await self._until(self._all_captured)
                if attempt == SEAL_TRIES - 1:
                    raise
            except TierError as error:
                if self.space.config.remote is None:
                    raise
                logger.warning("%s does not become local, only durable: %s", save.directory, error)
                return
        save.level = Level.LOCAL
        save.settled = self.space.config.remote is None
        save.notify()
        await self.space.retain(remote=False)

    async def _flush_and_commit(self) -> None:
        """Wait for the blocks to reach the remote tier, and make the version exist there: level ``durable``."""
        save = self.save
        try:
            await self._until(lambda: self._flush_error is not None or save.flushed == len(save.keys))
            if self._flush_error is not None:
                raise self._flush_error
            run = await self.space.acquire_run()
            root = roots.encode(await self._write_table(run=run))
            self._committing = True
            await self.space.nodes.call("", "commit", root=root)
        except TierError:
            # another run that has taken the number, or the name, may have collected our files under our hands
            await self.space.nodes.call(
                "", "check_place", version=save.version, attempt=save.attempt, run=self.space.run
            )
            raise
        save.level = Level.DURABLE
        save.notify()
        save.settled = True
        await self.space.retain(remote=True)
        # older ones may have been under way when this one became local
        await self.space.retain(remote=False)

    async def _failed(self, error: VelocError) -> None:
        save = self.save
        save.error = error
        logger.warning(
            "%s version %s failed after level %s: %s", self.space.name, save.version, save.level.name.lower(), error
        )
        if isinstance(error, VersionExists):
            self.space.burn(save.version)
        # a version that lost its number to another run must not be found on the nodes either
        everything = save.level < Level.LOCAL or isinstance(error, VersionExists)
        # after an error in the commit itself nobody knows whether the root exists: retention finds out, with a tombstone
        uncertain = self._committing and not isinstance(error, VersionExists)
        # a version that stays local keeps what it has on the remote tier alone
        needed = not everything and "" in save.nodes
        self.space.abort(save, local=everything, remote=not (uncertain or needed))

    def _unpin(self) -> None:
        internals.forget_pseudo_client(self.space.scheduler, self.save.client)

    async def _write_table(self, *, run: int | None) -> roots.Root:
        """Write the table, on each node its own part or all of it to the remote tier, and return the root over it."""
        save = self.save
        await self._until(self._all_captured)  # a node may have been lost since
        rows, nodes = list(save.rows), list(save.nodes)
        by_node: dict[str, list[int]] = defaultdict(list)
        for number, node in enumerate(nodes):
            by_node[node].append(number)
        segments: list[roots.Segment] = []
        outside_view: set[str] = set()
        for node, numbers in sorted(by_node.items()):
            for start in range(0, len(numbers), table.SEGMENT_ROWS):
                part = numbers[start : start + table.SEGMENT_ROWS]
                path = layout.segment_path(len(segments))
                reply = await self.space.nodes.call(
                    node,
                    "write_segment",
                    required=run is None,
                    directory=save.directory,
                    path=path,
                    rows=[rows[n] for n in part],
                    remote=run is not None,
                )
                segments.append(roots.Segment(path, node, len(part), reply["nbytes"], reply["sha256"]))
                outside_view |= set(reply["outside_view"])
        return roots.Root(
            roots.FORMAT,
            roots.FORMAT_VERSION,
            self.space.name,
            save.version,
            save.attempt,
            run,
            self.space.run_uuid,
            datetime.now(UTC).isoformat(timespec="seconds"),
            save.structure,
            [msgspec.structs.replace(i, view=i.spec.path not in outside_view) for i in save.items],
            segments,
            {},  # the worker that writes the root adds the zarr.json files
            len(save.keys),
            save.nbytes,
        )


class ProtectDriver(SaveDriver):
    """Protected keys: captured like the blocks of a version that never ends, is never flushed and keeps nothing alive."""

    flushes = False
    pins = False

    def progressed(self) -> None:
        pass

    def fail(self, error: VelocError) -> None:
        logger.warning("a protected key has no snapshot: %s", error)


def lost_blocks(save: Save, numbers: Iterable[int]) -> BlockLost:
    """The error for blocks that were captured, lost with their node before the flush, and cannot be captured again."""
    first = next(iter(numbers))
    return BlockLost(
        f"{save.describe(first)}: its node was lost before the block reached the remote tier, and nobody holds or wants the "
        "data any more; save again"
    )
