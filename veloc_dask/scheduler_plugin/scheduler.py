"""The scheduler plugin: Dask's hooks and our handlers, and the tables that connect keys with saves.

Every hook returns within microseconds for keys that do not concern us, and no exception of ours reaches Dask: in a stream
handler it would cost a worker its connection. State that belongs to one checkpoint name lives in its `Space`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from veloc_dask.scheduler_plugin import catalog, internals, messages
from veloc_dask.scheduler_plugin.internals import Key
from veloc_dask.scheduler_plugin.messages import SaveRequest, SpaceConfig
from veloc_dask.scheduler_plugin.recovery import Recovery
from veloc_dask.scheduler_plugin.saves import SaveDriver
from veloc_dask.scheduler_plugin.space import SLICE, Space
from veloc_dask.scheduler_plugin.worker import VelocWorker, load_block
from veloc_dask.storage.errors import BlockLost, CheckpointNotFound, ConfigError, VelocError
from veloc_dask.storage.reader import BlockRef

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("veloc_dask")

F = TypeVar("F", bound=Callable[..., Any])

WORKER_TIMEOUT_S = 60.0
DISPATCH_S = 0.002


def guarded(function: F) -> F:
    """For hooks and stream handlers: log and count an exception of ours, never let Dask see it."""

    @functools.wraps(function)
    def wrapper(self: VelocPlugin, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Exception:
            self.failures += 1
            if self.failures <= 10:
                logger.exception("veloc_dask: %s failed; Dask goes on", function.__name__)
            return None

    return wrapper  # type: ignore[return-value]


class VelocPlugin(SchedulerPlugin):
    """Checkpointing for one Dask cluster. Registers its worker side itself.

    A `veloc_dask.Checkpointer` registers it when it is needed; by hand: ``client.register_plugin(VelocPlugin())``.
    """

    name = "veloc"
    idempotent = True

    scheduler: Scheduler
    recovery: Recovery

    def __init__(self) -> None:
        self.run_uuid = uuid.uuid4().hex
        self.spaces: dict[str, Space] = {}
        self.wanted: dict[Key, list[tuple[SaveDriver, int]]] = {}  # blocks to capture as soon as they are in memory
        self.unknown: set[Key] = set()  # wanted keys whose graph has not reached the scheduler yet
        self.protectors: dict[Key, list[Space]] = {}
        self.failures = 0
        self._ready: list[Key] = []
        self._everything = False
        self._dispatching = False
        self._opening: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.recovery = Recovery(scheduler, self._loader)
        scheduler.stream_handlers["veloc-captured"] = self.on_captured
        scheduler.stream_handlers["veloc-flushed"] = self.on_flushed
        scheduler.stream_handlers["veloc-unreadable"] = self.on_unreadable
        for handler in (
            self.veloc_join,
            self.veloc_space,
            self.veloc_save,
            self.veloc_watch,
            self.veloc_protect,
            self.veloc_unprotect,
            self.veloc_protected,
            self.veloc_versions,
            self.veloc_restore,
            self.veloc_read_stored,
            self.veloc_release,
            self.veloc_delete,
            self.veloc_prune,
            self.veloc_verify,
            self.veloc_where,
            self.veloc_drain,
        ):
            scheduler.handlers[handler.__name__] = messages.answering(handler)
        scheduler.handlers["veloc_stats"] = self.veloc_stats
        # the stream handlers exist before the first worker can send to them
        await scheduler.register_worker_plugin(
            comm=None, plugin=dumps(VelocWorker()), name=VelocWorker.name, idempotent=True
        )

    def _background(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- hooks ------------------------------------------------------------------------------------------------------

    @guarded
    def transition(self, key: Key, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        if key in self.wanted:
            if finish == "memory":
                self._ready.append(key)
                self.dispatch_soon()
            elif finish == "erred":
                text = self.scheduler.tasks[key].exception_text or "its task failed"
                self._fail_wanted(key, lambda what: VelocError(f"{what}: its task raised {text}"))
            elif finish == "forgotten":
                self._fail_wanted(
                    key,
                    lambda what: BlockLost(f"{what}: {key!r} was cancelled or lost before it was captured; save again"),
                )
        if finish == "forgotten" and key in self.protectors:
            for space in self.protectors.pop(key):
                space.unprotect(key)
        if self.recovery.concerns(key):
            self.recovery.transition(key, start, finish)

    def _fail_wanted(self, key: Key, error: Callable[[str], VelocError]) -> None:
        for driver, number in self.wanted.pop(key, []):
            driver.fail(error(driver.save.describe(number)))

    @guarded
    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: Any) -> None:
        if self.unknown:
            for key in [k for k in self.unknown if k in scheduler.tasks]:
                self.unknown.discard(key)
                for driver, _ in self.wanted.get(key, ()):
                    if driver.pins:
                        internals.keep_keys(scheduler, [key], driver.save.client)
        if any(space.leases for space in self.spaces.values()):
            for key in tasks:
                ts = scheduler.tasks.get(key)
                if ts is not None and internals.is_loader(ts):
                    refs = internals.loader_arguments(ts)[0]
                    workers = self._near(messages.decode(refs[0], BlockRef))
                    if workers:
                        internals.prefer_workers(ts, workers)

    @guarded
    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        for space in self.spaces.values():
            space.worker_left(worker)

    @guarded
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for space in self.spaces.values():
            for lease in space.leases.values():
                if lease.client == client:
                    lease.released = True

    @guarded
    def restart(self, scheduler: Scheduler) -> None:
        self.recovery.clear()
        for space in self.spaces.values():
            for driver in space.active():
                if driver.pins and driver.save.captured < len(driver.save.keys):
                    driver.fail(
                        BlockLost(
                            f"{space.name!r} version {driver.save.version}: the cluster was restarted in mid-save"
                        )
                    )
            space.protected.clear()
        self.wanted.clear()
        self.unknown.clear()
        self.protectors.clear()

    async def close(self) -> None:
        for task in [d.task for s in self.spaces.values() for d in s.active() if d.task is not None]:
            task.cancel()
        for task in list(self._tasks):
            task.cancel()

    # -- keys and who needs them ------------------------------------------------------------------------------------

    def want(self, key: Key, driver: SaveDriver, number: int) -> None:
        """The block is to be captured as soon as it is in memory on a worker that is ready."""
        self.wanted.setdefault(key, []).append((driver, number))
        ts = self.scheduler.tasks.get(key)
        if ts is not None:
            if ts.state == "memory":
                self._ready.append(key)
                self.dispatch_soon()
            elif ts.state == "erred":
                text = ts.exception_text or "its task failed"
                self._fail_wanted(key, lambda what: VelocError(f"{what}: its task raised {text}"))

    def unwant(self, key: Key, driver: SaveDriver, number: int) -> None:
        wanted = self.wanted.get(key)
        if wanted is not None:
            wanted[:] = [w for w in wanted if w != (driver, number)]
            if not wanted:
                del self.wanted[key]
                self.unknown.discard(key)

    def dispatch_soon(self, *, everything: bool = False) -> None:
        self._everything |= everything
        if not self._dispatching:
            self._dispatching = True
            # not at once: orders of a moment travel together, and a new save's answer to its client goes first
            asyncio.get_running_loop().call_later(DISPATCH_S, self._dispatch)

    @guarded
    def _dispatch(self) -> None:
        self._dispatching = False
        if self._everything:
            self._everything = False
            self._ready = list(self.wanted)
        now, self._ready = self._ready[:SLICE], self._ready[SLICE:]
        by_space: dict[str, list[tuple[SaveDriver, int]]] = {}
        for key in now:
            for driver, number in self.wanted.pop(key, ()):
                by_space.setdefault(driver.space.name, []).append((driver, number))
        for name, wanted in by_space.items():
            for driver, number in self.spaces[name].order(wanted):
                self.wanted.setdefault(driver.save.keys[number], []).append((driver, number))
        if self._ready:
            self.dispatch_soon()

    def _near(self, ref: BlockRef) -> list[str]:
        """The workers on nodes that hold a copy; empty if that is no narrower than all workers."""
        space = self.spaces.get(ref.name)
        if space is None or not ref.nodes:
            return []
        near = [a for a, n in space.nodes.of.items() if n in ref.nodes]
        return near if len(near) < len(self.scheduler.workers) else []

    def _loader(self, key: Key, refs: list[BlockRef]) -> tuple[Any, list[str]]:
        ts = self.scheduler.tasks[key]
        ours = internals.is_loader(ts) and self.recovery.stands_in(
            key
        )  # a restore's load task is a lineage like others
        may_recompute = ts.run_spec is not None and not ts.has_lost_dependencies and not ours
        task = internals.load_task(
            key, load_block, [messages.encode(r) for r in refs], "recompute" if may_recompute else "raise"
        )
        return task, self._near(refs[0])

    # -- reports of the workers -------------------------------------------------------------------------------------

    @guarded
    def on_captured(self, worker: str, name: str, **message: Any) -> None:
        if name in self.spaces:
            self.spaces[name].on_captured(worker, **message)

    @guarded
    def on_flushed(self, worker: str, name: str, **message: Any) -> None:
        if name in self.spaces:
            self.spaces[name].on_flushed(worker, **message)

    @guarded
    def on_unreadable(self, worker: str, key: Key) -> None:
        self.recovery.unreadable(key)

    async def veloc_join(self, address: str) -> None:
        """A worker's plugin is set up: it can be told which tiers to open."""
        for space in self.spaces.values():
            self._background(space.open_on(address, joining=True))

    # -- calls of the clients ---------------------------------------------------------------------------------------

    def space(self, name: str) -> Space:
        found = self.spaces.get(name)
        if found is None:
            raise CheckpointNotFound(f"no Checkpointer has been opened for {name!r} in this cluster")
        return found

    async def veloc_space(self, config: bytes) -> None:
        """Open a checkpoint name on all workers; ConfigError if it cannot work."""
        wanted = messages.decode(config, SpaceConfig)
        async with self._opening.setdefault(wanted.name, asyncio.Lock()):
            space = self.spaces.get(wanted.name)
            if space is not None:
                if space.config != wanted:
                    raise ConfigError(
                        f"{wanted.name!r} is open in this cluster with other settings (tiers, remote, keep or options); "
                        "use the same ones, or another name"
                    )
                return
            space = self.spaces[wanted.name] = Space(self, wanted)
            try:
                await asyncio.gather(*(space.open_on(a) for a in list(self.scheduler.workers)))
                if space.nodes.open_errors:
                    raise next(iter(space.nodes.open_errors.values()))
                await space.nodes.wait_for(1, WORKER_TIMEOUT_S)
                found = await catalog.gather(space)
                space.taken.update(found.taken)
                space.seen.update(found.seen)
                self._background(space.retain(remote=False))  # what dead clusters left on these nodes
            except BaseException:
                del self.spaces[wanted.name]
                raise

    async def veloc_save(self, request: bytes, keys: list[list[Key]], plain: dict[int, bytes]) -> dict[str, Any]:
        wanted = messages.decode(request, SaveRequest)
        space = self.space(wanted.name)
        save = await space.start_save(wanted, [list(k) for k in keys], plain)
        return {"id": save.attempt, "version": save.version, "process": f"{socket.gethostname()}:{os.getpid()}"}

    async def veloc_watch(self, name: str, seen: dict[str, int], timeout_s: float) -> dict[str, tuple[int, bytes]]:
        return await self.space(name).watch(seen, timeout_s)

    async def veloc_protect(self, name: str, keys: list[Key]) -> None:
        await self.space(name).protect(list(keys))

    async def veloc_unprotect(self, name: str, keys: list[Key]) -> None:
        space = self.space(name)
        for key in keys:
            spaces = self.protectors.get(key, [])
            if space in spaces:
                spaces.remove(space)
                if not spaces:
                    del self.protectors[key]
            space.unprotect(key)

    async def veloc_protected(self, name: str) -> list[tuple[Key, bool]]:
        """Each protected key, and whether it has its snapshot already."""
        return self.space(name).is_protected()

    async def veloc_versions(self, name: str) -> list[bytes]:
        found = await catalog.gather(self.space(name))
        return [messages.encode(v) for v in found.versions]

    async def veloc_restore(
        self, name: str, version: int | None, client: str, wait_for: int, timeout_s: float
    ) -> dict[str, Any]:
        space = self.space(name)
        if wait_for:
            await space.nodes.wait_for(wait_for, timeout_s)
        return await catalog.fetch(space, version, client)

    async def veloc_read_stored(self, ref: bytes) -> dict[str, Any]:
        """The stored bytes of one block, verified, for a client, and whether it may unpickle them."""
        block = messages.decode(ref, BlockRef)
        space = self.space(block.name)
        last: VelocError | None = None
        for node in [*block.nodes, ""]:
            if node and not space.nodes.workers_of(node):
                continue
            try:
                data = await space.nodes.call(node, "read_block", ref=ref)
                return {"data": data, "allow_pickle": space.config.allow_pickle}
            except BlockLost as error:
                last = error
        raise last or BlockLost(f"{block.name!r}: no worker can be reached")

    async def veloc_release(self, name: str, lease: str) -> None:
        space = self.spaces.get(name)
        if space is not None and lease in space.leases:
            space.leases[lease].released = True

    async def veloc_delete(self, name: str, version: int) -> None:
        await catalog.delete(self.space(name), version)

    async def veloc_prune(self, name: str) -> None:
        space = self.space(name)
        await space.retain(remote=False)
        if space.config.remote is not None:
            await space.retain(remote=True)

    async def veloc_verify(self, name: str, version: int | None) -> dict[str, Any]:
        return await catalog.verify(self.space(name), version)

    async def veloc_where(self, name: str, nodes: list[str]) -> list[str]:
        """Addresses of workers on these nodes, for a worker that wants to read from a peer."""
        space = self.space(name)
        return [a for node in nodes for a in space.nodes.workers_of(node)]

    async def veloc_stats(self) -> dict[str, Any]:
        return {
            **self.recovery.counts,
            "snapshots": len(self.recovery.snapshots),
            "wanted": len(self.wanted),
            "failures": self.failures,
        }

    async def veloc_drain(self, name: str, timeout_s: float) -> list[bytes]:
        """Wait until the saves under way have ended, at most `timeout_s`; the statuses of those that have not."""
        space = self.space(name)
        tasks = [d.task for d in space.active() if d.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return [messages.encode(d.save.status()) for d in space.active() if d.pins]
