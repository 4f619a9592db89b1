"""The worker plugin: handlers for what the scheduler orders and asks, and the task that loads a block.

Orders (one-way messages) go to the `Pipeline`, calls to a method of the name's `WorkerSpace` in a thread. No exception of ours
reaches Dask's message streams: it would cost the worker its connection.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from distributed import Reschedule, get_client, get_worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT

from veloc_dask.scheduler_plugin import internals, messages
from veloc_dask.scheduler_plugin.internals import Key
from veloc_dask.scheduler_plugin.messages import SpaceConfig
from veloc_dask.scheduler_plugin.pipeline import FlushOrder, Order, Pipeline
from veloc_dask.scheduler_plugin.worker_space import CALLS, WorkerSpace
from veloc_dask.storage import reader, table
from veloc_dask.storage.blocks import ItemSpec
from veloc_dask.storage.board import process_start
from veloc_dask.storage.errors import BlockLost, ConfigError, IntegrityError, TierError, VelocError
from veloc_dask.storage.reader import BlockRef, Bytes, Copy
from veloc_dask.storage.tiers import block_path

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("veloc_dask")

T = TypeVar("T")

CALL_THREADS = 4
OPEN_S = 30.0  # how long a load task waits for the worker to open the tiers
PEER_S = 300.0


class VelocWorker(WorkerPlugin):
    """Worker side of `VelocPlugin`, which registers it. Its pickled form is empty."""

    name = "veloc-worker"
    idempotent = True

    worker: Worker

    def __reduce__(self) -> tuple[type[VelocWorker], tuple[()]]:
        return VelocWorker, ()

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        self.spaces: dict[str, WorkerSpace] = {}
        self.pipeline = Pipeline(worker)
        self._opening: dict[str, asyncio.Lock] = {}
        self._pool = ThreadPoolExecutor(CALL_THREADS, "veloc-call")
        self._closed = False
        orders: dict[str, Callable[..., None]] = {
            "veloc-capture": self.on_capture,
            "veloc-flush": self.on_flush,
            "veloc-abort": self.on_abort,
            "veloc-forget": self.on_forget,
        }
        for op, handler in orders.items():
            worker.stream_handlers[op] = self._guarded(handler)
        internals.load_without_old_dependencies(worker)
        worker.handlers["veloc_open"] = messages.answering(self.veloc_open)
        worker.handlers["veloc_call"] = messages.answering(self.veloc_call)
        worker.loop.add_callback(self._join)

    async def _join(self) -> None:
        """Tell the scheduler that this worker can be told which tiers to open."""
        for pause in (0.2, 1.0, 5.0, None):
            try:
                messages.result(await self.worker.scheduler.veloc_join(address=self.worker.address))
            except (OSError, AttributeError) as error:
                if pause is None or self._closed:
                    logger.warning("this worker takes no part in checkpoints: %s", error)
                    return
                await asyncio.sleep(pause)
            else:
                return

    async def teardown(self, worker: Worker) -> None:
        self._closed = True
        self.pipeline.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for space in self.spaces.values():
            space.close()

    @staticmethod
    def _guarded(handler: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(handler)
        def wrapper(**message: Any) -> None:
            try:
                handler(**message)
            except Exception:
                logger.exception("veloc_dask: %s failed; the worker goes on", handler.__name__)

        return wrapper

    # -- orders of the scheduler ------------------------------------------------------------------------------------

    def on_capture(
        self,
        name: str,
        save: str,
        directory: str,
        specs: Collection[tuple[int, bytes]],
        blocks: Collection[tuple[int, Key, int, tuple[int, ...]]],
        plain: Collection[tuple[int, int, bytes]],
        flush: bool,
    ) -> None:
        space = self.spaces[name]
        known = {item: messages.decode(spec, ItemSpec) for item, spec in specs}
        orders = [Order(space, save, directory, n, key, known[i], tuple(at), None, flush) for n, key, i, at in blocks]
        orders += [Order(space, save, directory, n, None, known[i], (), data, flush) for n, i, data in plain]
        self.pipeline.capture(orders)

    def on_flush(self, name: str, save: str, directory: str, blocks: Collection[tuple[int, bytes]]) -> None:
        space = self.spaces[name]
        self.pipeline.flush([FlushOrder(space, save, directory, n, table.decode_row(row)) for n, row in blocks])

    def on_abort(self, name: str, directory: str, local: bool, remote: bool) -> None:
        if name in self.spaces:
            self.pipeline.abort(self.spaces[name], directory, local=local, remote=remote)

    def on_forget(self, name: str, directory: str, rows: Collection[bytes]) -> None:
        """Delete single blocks (of protected keys)."""
        node = self.spaces[name].node
        for row in rows:
            self._pool.submit(node.remove, block_path(name, directory, table.decode_row(row).object))

    # -- calls of the scheduler -------------------------------------------------------------------------------------

    async def _thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run storage I/O in a thread. An OSError comes out as TierError: a bare one means that the worker was lost."""
        try:
            work = functools.partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except VelocError:
            raise
        except OSError as error:
            raise TierError(str(error)) from error

    async def veloc_open(self, config: bytes, run_uuid: str, workers_nbytes: int | None) -> dict[str, Any]:
        """Open the tiers of a checkpoint name; `workers_nbytes` is the sum of the node's workers' memory limits."""
        wanted = messages.decode(config, SpaceConfig)
        async with self._opening.setdefault(wanted.name, asyncio.Lock()):
            space = self.spaces.get(wanted.name)
            if space is None or space.config != wanted or space.run_uuid != run_uuid:
                # workers stop taking tasks at the pause fraction of their limit: what is above it, a tier in RAM may use
                pause = self.worker.memory_manager.memory_pause_fraction or 1.0
                budget = MEMORY_LIMIT // 2
                reason = f"half of the node's {MEMORY_LIMIT:,} bytes, since the workers have no memory_limit"
                if workers_nbytes is not None:
                    budget = MEMORY_LIMIT - int(workers_nbytes * pause)
                    reason = (
                        f"the node has {MEMORY_LIMIT:,} bytes, its workers may use {pause:g} of {workers_nbytes:,}, "
                        f"{max(0, budget):,} are left"
                    )
                opened = await self._thread(
                    WorkerSpace.open,
                    wanted,
                    run_uuid,
                    ram_budget_nbytes=budget,
                    ram_budget_reason=reason,
                    forbidden=[self.worker.local_directory],
                )
                if space is not None:
                    space.close()
                space = self.spaces[wanted.name] = opened
        process = f"{self.worker.ip}:{os.getpid()}:{process_start(os.getpid())}"
        return {"node": space.node.uuid, "process": process}

    async def veloc_call(self, name: str, call: str, arguments: dict[str, Any]) -> Any:
        """Run one of the calls of `WorkerSpace`."""
        if call not in CALLS:
            raise BlockLost(
                f"this worker does not know the call {call!r}; is its veloc_dask as new as the scheduler's?"
            )
        return await self._thread(getattr(self.spaces[name], call), **arguments)

    # -- loading in a task ------------------------------------------------------------------------------------------

    def load(self, refs: Sequence[bytes]) -> Any:
        """The value of a block from the nearest copy that can be read: this node, a peer, the remote tier."""
        problems = []
        for ref in refs:
            block = messages.decode(ref, BlockRef)
            space = self._opened(block.name)
            nearby = msgspec.structs.replace(block, remote=False)
            for read, source in ((space.read_here, nearby), (self._read_from_peer, nearby), (space.read_here, block)):
                try:
                    stored = read(source)
                except OSError as error:
                    problems.append(str(error))
                    continue
                row = table.decode_row(block.row)
                return reader.decode(row, block.spec, stored, allow_pickle=space.config.allow_pickle)
        raise BlockLost("; ".join(dict.fromkeys(problems)))

    def _opened(self, name: str) -> WorkerSpace:
        """The opened space; a worker that has just joined may still be opening it."""
        deadline = time.monotonic() + OPEN_S
        while name not in self.spaces:
            if time.monotonic() > deadline:
                raise ConfigError(f"this worker has not opened the tiers of {name!r}; its log says why")
            time.sleep(0.05)
        return self.spaces[name]

    def _read_from_peer(self, block: BlockRef) -> Bytes:
        peers = [n for n in block.nodes if n != self.spaces[block.name].node.uuid]
        if not peers:
            raise BlockLost("no other node holds a copy")
        row = table.decode_row(block.row)

        async def ask() -> Any:
            addresses = messages.result(await self.worker.scheduler.veloc_where(name=block.name, nodes=peers))
            for address in addresses:
                arguments = {"ref": messages.encode(block)}
                try:
                    return messages.result(
                        await self.worker.rpc(address).veloc_call(
                            name=block.name, call="read_block", arguments=arguments
                        )
                    )
                except OSError as error:
                    logger.info("peer %s could not give a copy of %s: %s", address, row.object, error)
            raise BlockLost(f"{row.object}: nodes {', '.join(peers)} held a copy; none of their workers could give it")

        loop = self.worker.loop.asyncio_loop  # type: ignore[attr-defined]
        data = asyncio.run_coroutine_threadsafe(ask(), loop).result(timeout=PEER_S)
        copy = Copy("a peer", lambda: np.frombuffer(bytearray(data), np.uint8))
        return reader.read_verified(row, [copy], what=f"{block.name!r} {block.directory}")

    def unreadable(self, key: Key) -> None:
        """Tell the scheduler, before the task's own end does, that a key's snapshots cannot be read."""
        self.worker.loop.add_callback(self.worker.batched_send, {"op": "veloc-unreadable", "key": key})


def load_block(refs: Sequence[bytes], otherwise: str = "", lease: object = None) -> Any:
    """What a load task runs: the block's value from its nearest verified copy.

    Parameters
    ----------
    refs
        Encoded `BlockRef` of each snapshot of the block, the best one first.
    otherwise
        If none can be read: "recompute" hands the key back to Dask's lineage, "raise" reports that there is none,
        "" is a task of a restored graph, which has no other way.
    lease
        Not used here: it keeps the restored version while the client has the task.
    """
    try:
        worker = get_worker()
    except ValueError:
        return _load_through_client(refs)
    plugin = worker.plugins.get(VelocWorker.name)
    if not isinstance(plugin, VelocWorker):
        raise BlockLost(
            f"worker {worker.address} has no plugin of veloc_dask; open a Checkpointer in this cluster first"
        )
    try:
        return plugin.load(refs)
    except Exception as error:
        if otherwise and isinstance(error, IntegrityError):  # not if it is this worker that cannot read
            plugin.unreadable(worker.get_current_task())
        if otherwise == "recompute":
            logger.warning("a snapshot cannot be loaded: %s", error)
            raise Reschedule() from error
        raise


def _load_through_client(refs: Sequence[bytes]) -> Any:
    """A restored graph is computed outside of the cluster (``scheduler="sync"``): a worker reads the block for us."""
    client: Any = get_client()
    block = messages.decode(refs[0], BlockRef)
    reply = messages.result(client.sync(client.scheduler.veloc_read_stored, ref=refs[0]))
    stored = np.frombuffer(bytearray(reply["data"]), np.uint8)
    return reader.decode(table.decode_row(block.row), block.spec, stored, allow_pickle=reply["allow_pickle"])
