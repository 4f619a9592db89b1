"""Everything of Dask that we touch and that Dask does not promise to keep, gathered here.

``tests/test_internals.py`` has a test for each function that fails loudly when distributed changes. Facts behind the code
(distributed 2026.8): edges between tasks are symmetric, ``waiters`` is a subset of ``dependents`` and may be None, a task's
``run_spec`` and edges may be replaced only while it is in memory or released, and the hook for ``memory -> released`` is the
last moment at which the following ``released -> waiting`` sees them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from dask._task_spec import Alias, DataNode, Task
from distributed import Future
from distributed.protocol.serialize import deserialize_bytes
from distributed.scheduler import ClientState
from distributed.worker_state_machine import FreeKeysEvent

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.scheduler import Scheduler, TaskState

Key = Any  # str, bytes, int, float or nested tuples of them

_hold_number = itertools.count()
_P2P = "shuffle_original_restrictions"


def future_keys(graph: Any, keys: Iterable[Key]) -> list[Key] | None:
    """The keys of the futures behind the keys of a collection, in order; None if one of them is still to be computed.

    A persisted dataframe has a name of its own and aliases to the futures' keys.
    """
    found = []
    for key in keys:
        node = graph.get(key)
        while isinstance(node, Alias):
            node = graph.get(node.target)
        if isinstance(node, DataNode):
            node = node.value
        if not isinstance(node, Future):
            return None
        found.append(node.key)
    return found


class LoadTask(Task):
    """A task that loads one block. It is never fused into another one, so its key stays what it was."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        return True


def load_task(key: Key, function: Callable[..., Any], *args: Any) -> LoadTask:
    """A task without dependencies that calls `function` on a worker; scheduled like a data source."""
    return LoadTask(key, function, *args, _data_producer=True)


class Lineage:
    """How Dask would have computed a task, kept while a loader stands in for it.

    The task's upstream edges are moved to a stand-in task that is never run: it keeps the whole upstream closure from being
    forgotten, as the task itself would have done, even if every other user of it goes away meanwhile.
    """

    __slots__ = ("hold", "run_spec", "settings")

    def __init__(self, run_spec: Any, settings: dict[str, Any], hold: Key | None) -> None:
        self.run_spec = run_spec
        self.settings = settings
        self.hold = hold


_SETTINGS = (
    "retries",
    "worker_restrictions",
    "host_restrictions",
    "resource_restrictions",
    "loose_restrictions",
    "annotations",
)


def install_loader(
    scheduler: Scheduler, ts: TaskState, loader: LoadTask, workers: Collection[str], *, keep: bool
) -> Lineage | None:
    """Make `loader` the way in which `ts` is computed, preferably on `workers`; return what was there before.

    Only while `ts` is in memory or released. None where there is nothing worth keeping: scattered data has no lineage, that
    of a task whose upstream was forgotten cannot be run, and with ``keep=False`` it was kept before. The loader then stays.
    """
    assert ts.state in ("memory", "released"), ts
    assert not ts.waiting_on, ts
    lineage = None
    if keep and ts.run_spec is not None:
        settings = {name: getattr(ts, name) for name in _SETTINGS}
        hold = None
        if ts.dependencies:
            hold = f"veloc-lineage-{next(_hold_number)}"
            stand_in = scheduler.new_task(hold, ts.run_spec, "released")
            _move_edges(ts, stand_in)
        lineage = Lineage(ts.run_spec, settings, hold)
        if ts.has_lost_dependencies:
            drop_lineage(scheduler, lineage)
            lineage = None
    ts.has_lost_dependencies = False
    ts.run_spec = loader
    if ts.priority is None:  # scattered data never got one, and a task message needs it
        ts.priority = (0, scheduler.generation, 0)
    if ts.type is None:
        ts.type = "unknown"
    spans = scheduler.extensions.get("spans")
    if ts.group.span_id is None and spans is not None:
        # without a span every heartbeat of the worker that runs it fails, and the worker is dropped
        spans.observe_tasks([ts], span_metadata={"collections": []}, code=())
    # restrictions are about computing; a dead worker among them would leave the loader waiting for ever
    ts.host_restrictions = ts.resource_restrictions = None
    ts.worker_restrictions = set(workers) or None
    ts.loose_restrictions = bool(workers)
    ts.suspicious = 0
    if ts.annotations and _P2P in ts.annotations:
        ts.annotations = {k: v for k, v in ts.annotations.items() if k != _P2P}
    return lineage


def restore_lineage(scheduler: Scheduler, ts: TaskState, lineage: Lineage) -> None:
    """Undo `install_loader`; only while `ts` is in memory or released."""
    assert ts.state in ("memory", "released"), ts
    ts.run_spec = lineage.run_spec
    for name, value in lineage.settings.items():
        setattr(ts, name, value)
    if lineage.hold is not None:
        stand_in = scheduler.tasks.get(lineage.hold)
        if stand_in is None or stand_in.has_lost_dependencies:
            ts.has_lost_dependencies = True
        if stand_in is not None:
            _move_edges(stand_in, ts)
    drop_lineage(scheduler, lineage)


def drop_lineage(scheduler: Scheduler, lineage: Lineage) -> None:
    """The lineage is not needed any more: let the stand-in, and what only it kept, be forgotten."""
    if lineage.hold in scheduler.tasks:
        # synchronously, although a transition may be under way: ``Scheduler.restart`` asserts that releasing all clients'
        # keys leaves no task behind. The stand-in is unknown to every other transition, and keys are looked up anew.
        scheduler.transitions({lineage.hold: "forgotten"}, stimulus_id="veloc-drop-lineage")


def _move_edges(source: TaskState, target: TaskState) -> None:
    for dependency in list(source.dependencies):
        dependency.dependents.discard(source)
        if dependency.waiters:
            dependency.waiters.discard(source)
        target.add_dependency(dependency)
    source.dependencies.clear()


def is_loader(ts: TaskState) -> bool:
    return type(ts.run_spec) is LoadTask


def loader_arguments(ts: TaskState) -> tuple[Any, ...]:
    """What the loader of a task is called with."""
    assert isinstance(ts.run_spec, LoadTask)
    return ts.run_spec.args


def prefer_workers(ts: TaskState, workers: Collection[str]) -> None:
    """Run a new task on one of `workers` if they are there, else anywhere."""
    if ts.worker_restrictions is None and ts.host_restrictions is None and ts.resource_restrictions is None:
        ts.worker_restrictions = set(workers)
        ts.loose_restrictions = True


def keep_keys(scheduler: Scheduler, keys: Iterable[Key], client: str) -> None:
    """Have a pseudo client want keys (unknown ones are passed over), so that they live for as long as it does.

    What `Scheduler.client_desires_keys` does for queues and published datasets, without a report for each key to a client
    that has no connection.
    """
    state = scheduler.clients.get(client)
    if state is None:
        state = scheduler.clients[client] = ClientState(client)
    for key in keys:
        ts = scheduler.tasks.get(key)
        if ts is None:
            continue
        if ts.who_wants is None:
            ts.who_wants = set()
        ts.who_wants.add(state)
        state.wants_what.add(ts)


def compute_if_wanted(scheduler: Scheduler, key: Key) -> None:
    """Have Dask compute a released key that somebody wants; not to be called while a transition is under way."""
    ts = scheduler.tasks.get(key)
    if ts is not None and ts.state == "released" and (ts.who_wants or ts.waiters):
        scheduler.transitions({key: "waiting"}, stimulus_id="veloc-compute-again")


def forget_pseudo_client(scheduler: Scheduler, client: str) -> None:
    """Remove a client that only `keep_keys` made, and let go of all that it wanted."""
    state = scheduler.clients.get(client)
    if state is None:
        return
    if state.wants_what:
        scheduler.client_releases_keys([ts.key for ts in state.wants_what], client)
    scheduler.clients.pop(client, None)


def group_exists(scheduler: Scheduler, prefix: str) -> bool:
    """Whether a task whose group's name begins with `prefix` is still known."""
    return any(g.startswith(prefix) for g in scheduler.task_groups)


_STALE = ("released", "fetch", "flight", "missing", "error", "cancelled", "resumed")


def load_without_old_dependencies(worker: Worker) -> None:
    """Have a worker forget what a key depended on before it runs a loader of it.

    A worker that has computed a key keeps its dependencies for as long as a dependent of it lives there, also when the value
    has gone elsewhere. The next order to compute the key only adds to them, so a loader, which has none, would wait there for
    data that nobody makes any more. Orders come from the scheduler or, by way of it, from a thief: this sees all of them.
    """
    original = worker.stream_handlers["compute-task"]

    def compute_task(**message: Any) -> Any:
        if type(message.get("run_spec")) is LoadTask:
            drop_old_dependencies(worker, message["key"])
        return original(**message)

    worker.stream_handlers["compute-task"] = compute_task


def drop_old_dependencies(worker: Worker, key: Key) -> None:
    """Cut a key's upstream edges on a worker, and free what only they kept there."""
    ts = worker.state.tasks.get(key)
    if ts is None or ts.state not in _STALE or not ts.dependencies:
        return
    unneeded = []
    for dependency in list(ts.dependencies):
        dependency.dependents.discard(ts)
        dependency.waiters.discard(ts)
        if not dependency.dependents and dependency.state in ("released", "fetch", "missing"):
            unneeded.append(dependency.key)
    ts.dependencies.clear()
    ts.waiting_for_data.clear()
    if unneeded:
        worker.handle_stimulus(FreeKeysEvent(keys=unneeded, stimulus_id="veloc-drop-dependencies"))


class Spilled:
    """The serialised value of a key in Dask's spill directory, opened so that it stays readable after Dask deletes it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.nbytes = os.fstat(self._fd).st_size

    def load(self) -> Any:
        """The value, without bringing it back into the worker's own store."""
        try:
            data = bytearray(self.nbytes)
            done = 0
            while done < len(data):
                n = os.preadv(self._fd, [memoryview(data)[done:]], done)
                if not n:
                    raise OSError(f"Dask's spill file ends after {done} of {len(data)} bytes")
                done += n
            return deserialize_bytes(data)
        finally:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def peek(worker: Worker, key: Key) -> Any | Spilled:
    """The value that a worker holds for `key`, or a handle on its spill file. KeyError if it is not there.

    ``worker.data[key]`` would read a spilled value back into memory, and mark others as older than it.
    """
    data = worker.data
    if hasattr(data, "fast") and hasattr(data, "slow"):
        fast = data.fast
        fast = getattr(fast, "d", fast)  # past the LRU, whose lookup would count as a use
        if key in fast:
            return fast[key]
        files = data._slow_uncached.d  # type: ignore[attr-defined]
        return Spilled(os.path.join(files.directory, files.filenames[key]))
    return data[key]
