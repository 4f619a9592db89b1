"""Which worker is on which node, as far as one checkpoint name goes, and calling them.

A worker counts from the moment at which it has opened the name's tiers; the uuid that it found on them says which node it is
on. Calls go to any worker of a node, and to another one when the first is lost on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from distributed.comm.core import CommClosedError
from distributed.core import Status as WorkerStatus

from veloc_dask.scheduler_plugin import messages
from veloc_dask.scheduler_plugin.messages import SpaceConfig
from veloc_dask.storage.errors import BlockLost, ConfigError, TierError, VelocError
from veloc_dask.storage.remote import is_memory

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

logger = logging.getLogger("veloc_dask")

OPEN_RETRY_S = (2.0, 10.0)
NODE_GRACE_S = 30.0  # a nanny needs a few seconds to bring a worker back; after this the node counts as lost


class Nodes:
    """See the module.

    Attributes
    ----------
    of
        Worker address -> node uuid.
    open_errors
        Worker address -> why it could not open the tiers.
    outstanding
        Worker address -> how many blocks it was told to capture and has not reported.
    """

    def __init__(self, scheduler: Scheduler, config: SpaceConfig, run_uuid: str) -> None:
        self._scheduler = scheduler
        self._config = config
        self._name = config.name
        self._run_uuid = run_uuid
        self.of: dict[str, str] = {}
        self.open_errors: dict[str, VelocError] = {}
        self.outstanding: dict[str, int] = defaultdict(int)
        self._processes: set[str] = set()  # that have opened the tiers
        self._left: dict[str, asyncio.Event] = {}  # set when a worker that is being asked leaves
        self._joined = asyncio.Event()

    async def open_on(self, address: str, *, joining: bool) -> str | None:
        """Have a worker open the tiers; return and remember its node, or remember why it failed.

        While the name is being opened the failure is raised to its user; for a worker that joins later it is logged.
        """
        worker = self._scheduler.workers.get(address)
        if worker is None:
            return None
        reply: dict[str, Any] | None = None
        problem = VelocError()
        for pause in (*OPEN_RETRY_S, None):
            try:
                reply = await self._open(address, worker.host)
                break
            except VelocError as error:
                problem = error
                break
            except (OSError, CommClosedError) as error:
                if address not in self._scheduler.workers:
                    logger.info("worker %s left while it opened the tiers of %s: %s", address, self._name, error)
                    return None
                problem = TierError(f"worker {address} cannot be reached: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it is, blocks on this worker cannot be captured
                problem = VelocError(f"{type(error).__name__}: {error}")
                break
            if pause is not None:
                await asyncio.sleep(pause)
        if reply is None:
            self.open_errors[address] = problem
            if joining:
                logger.warning("worker %s cannot be used for %s: %s", address, self._name, problem)
            return None
        if address not in self._scheduler.workers:
            return None
        self._processes.add(reply["process"])
        if self._config.remote is not None and is_memory(self._config.remote) and len(self._processes) > 1:
            self.open_errors[address] = ConfigError(
                f"{self._name!r}: memory:// is one store per process, and this cluster has several worker processes: each would "
                "see its own; use a cluster of threads (processes=False), or a directory"
            )
            return None
        self.open_errors.pop(address, None)
        node: str = reply["node"]
        others = {w.host for a, n in self.of.items() if n == node and (w := self._scheduler.workers.get(a)) is not None}
        if others - {worker.host}:
            logger.warning(
                "%s and %s see the same tier marker: their local tiers of %s are one shared file system, not node-local",
                worker.host,
                next(iter(others)),
                self._name,
            )
        self.of[address] = node
        self._joined.set()
        self._joined = asyncio.Event()
        return node

    async def _open(self, address: str, host: str) -> dict[str, Any]:
        limits = [w.memory_limit for w in self._scheduler.workers.values() if w.host == host]
        worker: Any = self._scheduler.rpc(address)
        answer = await worker.veloc_open(
            config=messages.encode(self._config),
            run_uuid=self._run_uuid,
            workers_nbytes=sum(limits) if all(limits) else None,
        )
        reply: dict[str, Any] = messages.result(answer)
        return reply

    def left(self, address: str) -> str | None:
        """A worker is gone; return the node that it was on."""
        self.open_errors.pop(address, None)
        self.outstanding.pop(address, None)
        left = self._left.pop(address, None)
        if left is not None:
            left.set()
        return self.of.pop(address, None)

    def workers_of(self, node: str) -> list[str]:
        """Running workers on a node ("": on any), the least busy first."""
        found = [
            a
            for a, n in self.of.items()
            if (not node or n == node)
            and (w := self._scheduler.workers.get(a)) is not None
            and w.status in (WorkerStatus.running, WorkerStatus.paused, WorkerStatus.closing_gracefully)
        ]
        return sorted(
            found, key=lambda a: (self._scheduler.workers[a].status != WorkerStatus.running, self.outstanding[a])
        )

    async def call(self, node: str, call: str, *, required: bool = True, **arguments: Any) -> Any:
        """Call a worker of a node ("": of any), another one if it dies meanwhile; wait a while for one to join.

        Without `required` any worker will do when the node has none. Errors of ours that the worker raises pass through.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + NODE_GRACE_S
        last = "no worker has joined yet"
        while True:
            joined = self._joined
            addresses = self.workers_of(node) or (self.workers_of("") if not required else [])
            for address in addresses:
                if address not in self.of:
                    continue  # it has left while we asked another one
                try:
                    return messages.result(await self._ask(address, call, arguments))
                except VelocError:
                    raise
                except (OSError, CommClosedError) as error:
                    last = f"{address}: {error}"
            if addresses:
                await asyncio.sleep(0.1)  # until the scheduler has noticed that they are gone
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await joined.wait()
                if self.workers_of(node):
                    deadline = loop.time() + NODE_GRACE_S
            if loop.time() >= deadline:
                where = f"node {node}" if node else "the cluster"
                problem = next(iter(self.open_errors.values()), None)
                raise BlockLost(
                    f"{self._name!r}: no worker of {where} can be reached ({problem or last}); start a worker there and try again"
                )

    async def _ask(self, address: str, call: str, arguments: dict[str, Any]) -> Any:
        """One call to one worker, given up when the worker leaves: connecting to it would be tried for half a minute."""
        worker: Any = self._scheduler.rpc(address)
        left = self._left.setdefault(address, asyncio.Event())
        request = asyncio.ensure_future(worker.veloc_call(name=self._name, call=call, arguments=arguments))
        gone = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait({request, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise CommClosedError("the worker has left the cluster")
            return request.result()
        finally:
            request.cancel()
            gone.cancel()

    async def call_all(self, call: str, **arguments: Any) -> list[Any]:
        """Call one worker of each node; nodes that fail are logged and left out."""
        nodes = sorted(set(self.of.values()))
        replies = await asyncio.gather(*(self.call(n, call, **arguments) for n in nodes), return_exceptions=True)
        good = []
        for node, reply in zip(nodes, replies, strict=True):
            if isinstance(reply, BaseException):
                logger.warning("%s on node %s failed: %s", call, node, reply)
            else:
                good.append(reply)
        return good

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Until `count` nodes have joined (at least one worker)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while len(set(self.of.values())) < max(1, count):
            if self.open_errors and not self.of:
                raise next(iter(self.open_errors.values()))
            joined = self._joined
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + 0.5)):
                    await joined.wait()
            except TimeoutError:
                if loop.time() >= deadline:
                    raise ConfigError(
                        f"{self._name!r}: expected {max(1, count)} node(s) within {timeout_s:g} s, found "
                        f"{len(set(self.of.values()))}; start the workers first, or ask for fewer with wait_for="
                    ) from None
