"""Each private part of Dask that `internals` leans on, tried on a real scheduler and real workers.

One of these fails when distributed changes something that recovery depends on; the recovery tests would then fail as well, but
far away from the cause.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import Task, TaskRef, fuse_linear_task_spec
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import wait
from distributed.client import futures_of
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskState

import support
from support import Bed
from veloc_dask.scheduler_plugin import internals

pytestmark = pytest.mark.timeout(60)

BED: dict[str, Any] = {
    "n_workers": 2,
    "processes": False,
    "memory_limit": "500 MB",
    "config": {
        "distributed.worker.memory.target": 0.02,  # 10 MB of values in memory, the rest on disk
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
    },
}


def plus(*parts: Any) -> Any:
    return sum(parts)


def seven() -> int:
    return 7


@dataclasses.dataclass
class Seen:
    """What can be compared of a task before a loader stood in and after."""

    run_spec: Any
    dependencies: set[Any]
    settings: dict[str, Any]

    @classmethod
    def of(cls, ts: TaskState) -> Seen:
        settings = {name: getattr(ts, name) for name in internals._SETTINGS}
        return cls(ts.run_spec, {d.key for d in ts.dependencies}, settings)


def loader(key: Any) -> internals.LoadTask:
    return internals.load_task(key, seven)


# -- keys and graphs -----------------------------------------------------------------------------------------------------


def keys_found(collection: Any) -> list[Any] | None:
    from dask.core import flatten

    return internals.future_keys(collection.__dask_graph__(), flatten(collection.__dask_keys__()))


def test_future_keys_of_an_array(bed: Bed) -> None:
    lazy = da.ones((4, 4), chunks=2) + 1
    assert keys_found(lazy) is None
    x = lazy.persist()
    assert set(keys_found(x) or ()) == {f.key for f in futures_of(x)}
    assert keys_found(x + 1) is None
    assert set(keys_found(x[:2]) or ()) == {f.key for f in futures_of(x) if f.key[1] == 0}, "whole blocks are aliases"


def test_future_keys_of_a_dataframe(bed: Bed) -> None:
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    lazy = dd.from_pandas(pd.DataFrame({"a": range(8)}), npartitions=2) + 1
    assert keys_found(lazy) is None
    df = lazy.persist()
    found = keys_found(df)
    assert found is not None
    assert set(found) == {f.key for f in futures_of(df)}


def test_future_keys_of_a_delayed_object(bed: Bed) -> None:
    lazy = dask.delayed(plus)(1, 2)
    assert keys_found(lazy) is None
    x = lazy.persist()
    assert keys_found(x) == [f.key for f in futures_of(x)]


def test_a_load_task_is_a_data_source() -> None:
    task = loader("k")
    assert task.key == "k"
    assert task.data_producer
    assert not task.dependencies
    assert task() == 7
    assert type(task) is internals.LoadTask


def test_a_load_task_is_never_fused() -> None:
    chain = {"k": loader("k"), "l": Task("l", plus, TaskRef("k")), "m": Task("m", plus, TaskRef("l"))}
    fused = fuse_linear_task_spec(chain, {"m"})
    assert type(fused["k"]) is internals.LoadTask
    ordinary = fuse_linear_task_spec(chain | {"k": Task("k", seven)}, {"m"})
    assert "k" not in ordinary, "Dask does not fuse any more: the test above shows nothing"


def test_a_load_task_keeps_its_key_in_a_graph(bed: Bed) -> None:
    layer = {("load", i): internals.load_task(("load", i), np.full, 2, i) for i in range(3)}
    x = da.Array(HighLevelGraph({"load": MaterializedLayer(layer)}, {"load": set()}), "load", ((2,) * 3,), dtype=int)
    y = (x + 1).persist()
    assert y.compute().tolist() == [1, 1, 2, 2, 3, 3]
    found = bed.on_scheduler(lambda s: {k: internals.is_loader(s.tasks[k]) for k in layer})
    assert all(found.values())
    arguments = bed.on_scheduler(lambda s: [internals.loader_arguments(s.tasks[k]) for k in layer])
    assert arguments == [(2, 0), (2, 1), (2, 2)]


# -- a loader stands in --------------------------------------------------------------------------------------------------


class Events(SchedulerPlugin):
    """The order in which hooks are called."""

    name = "events"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        self.seen.append((key, start, finish))

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self.seen.append((worker,))


def test_the_hook_comes_before_the_key_is_scheduled_again(tmp_path: Path) -> None:
    """``memory -> released`` is the last moment, ``remove_worker`` is far too late."""
    bed = Bed(tmp_path, n_workers=2, processes=False)  # its worker does not come back
    x = bed.client.submit(plus, 1, key="x")
    wait(x)
    events = Events()
    (worker,) = bed.client.who_has([x])["x"]

    async def lose() -> None:
        scheduler = bed.cluster.scheduler
        scheduler.add_plugin(events)
        await scheduler.remove_worker(worker, stimulus_id="test", close=False, expected=False)
        scheduler.remove_plugin(events.name)

    bed.cluster.sync(lose)
    assert events.seen[:3] == [
        ("x", "memory", "released"),
        ("x", "released", "waiting"),
        ("x", "waiting", "processing"),
    ]
    assert (worker,) in events.seen[3:]
    assert x.result() == 1
    del x
    bed.assert_clean()
    bed.close()


def test_install_and_restore(bed: Bed) -> None:
    """The task is what it was before, and in between its inputs are kept by a stand-in."""
    a, b = (bed.client.submit(plus, i, key=f"in-{i}") for i in range(2))
    y = bed.client.submit(plus, a, b, key="y", retries=3)
    z = bed.client.submit(plus, y, 1, key="z")
    wait(z)
    del a, b
    support.until(lambda: bed.on_scheduler(lambda s: s.tasks["in-0"].state == "released"), "the inputs are released")

    def there_and_back(scheduler: Any) -> None:
        ts = scheduler.tasks["y"]
        before = Seen.of(ts)
        lineage = internals.install_loader(scheduler, ts, loader("y"), [], keep=True)
        assert lineage is not None
        assert not ts.dependencies
        assert internals.is_loader(ts)
        assert not ts.worker_restrictions
        stand_in = scheduler.tasks[lineage.hold]
        assert {d.key for d in stand_in.dependencies} == {"in-0", "in-1"}
        assert scheduler.tasks["in-0"].dependents == {stand_in}
        scheduler.validate_state()
        internals.restore_lineage(scheduler, ts, lineage)
        assert Seen.of(ts) == before
        assert lineage.hold not in scheduler.tasks
        scheduler.validate_state()

    bed.on_scheduler(there_and_back)
    assert bed.client.gather([y, z]) == [1, 2]


def test_install_and_drop(bed: Bed) -> None:
    """What only the stand-in kept is forgotten with it."""
    a = bed.client.submit(plus, 1, key="in")
    y = bed.client.submit(plus, a, key="y")
    wait(y)
    del a
    support.until(lambda: bed.on_scheduler(lambda s: s.tasks["in"].state == "released"), "the input is released")

    def drop(scheduler: Any) -> None:
        lineage = internals.install_loader(scheduler, scheduler.tasks["y"], loader("y"), [], keep=True)
        assert lineage is not None
        scheduler.validate_state()
        assert "in" in scheduler.tasks
        internals.drop_lineage(scheduler, lineage)
        assert set(scheduler.tasks) == {"y"}
        scheduler.validate_state()
        internals.drop_lineage(scheduler, lineage)  # once more does no harm

    bed.on_scheduler(drop)


def test_a_loader_runs_instead(bed: Bed) -> None:
    """Released and asked for again, the key is computed by the loader."""
    a = bed.client.submit(plus, 1, key="in")
    y = bed.client.submit(plus, a, key="y", workers=[bed.workers()[0]], allow_other_workers=False)
    wait(y)
    lineages = []

    class Swap(SchedulerPlugin):
        name = "swap"

        def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
            scheduler = bed.cluster.scheduler
            if (key, start, finish) == ("y", "memory", "released"):
                ts = scheduler.tasks["y"]
                lineages.append(internals.install_loader(scheduler, ts, loader("y"), [], keep=True))
            elif key == "y" and finish == "memory":
                internals.restore_lineage(scheduler, scheduler.tasks["y"], lineages[0])

    def lose(scheduler: Any) -> None:
        scheduler.add_plugin(Swap())
        scheduler.transitions({"y": "released"}, stimulus_id="test")

    bed.on_scheduler(lose)
    support.until(lambda: bed.on_scheduler(lambda s: s.tasks["y"].state == "memory"), "y is back")
    assert y.result() == 7
    bed.on_scheduler(lambda s: s.remove_plugin("swap"))
    assert len(lineages) == 1
    assert bed.on_scheduler(lambda s: {d.key for d in s.tasks["y"].dependencies}) == {"in"}


def test_install_on_scattered_data(bed: Bed) -> None:
    """It has neither run_spec nor priority nor span, and needs all three to be computed."""
    (future,) = bed.client.scatter([np.arange(3)], hash=False)

    def arm(scheduler: Any) -> None:
        ts = scheduler.tasks[future.key]
        assert ts.run_spec is None, "Dask gives scattered data a lineage now"
        assert internals.install_loader(scheduler, ts, loader(ts.key), [], keep=True) is None
        assert internals.is_loader(ts)
        assert ts.priority is not None
        assert ts.group.span_id is not None
        scheduler.validate_state()
        scheduler.transitions({ts.key: "released"}, stimulus_id="test")

    bed.on_scheduler(arm)
    assert future.result() == 7


def test_install_prefers_workers_and_lifts_restrictions(bed: Bed) -> None:
    worker = bed.workers()[0]
    y = bed.client.submit(plus, 1, key="y", workers=["tcp://127.0.0.1:1", worker], allow_other_workers=False)
    wait(y)

    def look(scheduler: Any) -> None:
        ts = scheduler.tasks["y"]
        ts.annotations = {**(ts.annotations or {}), internals._P2P: {"somebody"}, "mine": 1}
        ts.suspicious = 2
        before = Seen.of(ts)
        lineage = internals.install_loader(scheduler, ts, loader("y"), [worker], keep=True)
        assert lineage is not None
        assert lineage.hold is None, "without inputs there is nothing to hold"
        assert (ts.worker_restrictions, ts.loose_restrictions) == ({worker}, True)
        assert ts.suspicious == 0
        assert internals._P2P not in ts.annotations
        assert ts.annotations["mine"] == 1
        internals.restore_lineage(scheduler, ts, lineage)
        assert Seen.of(ts) == before
        scheduler.validate_state()

    bed.on_scheduler(look)


def test_the_annotation_of_shuffles_has_its_name() -> None:
    """P2P keeps a task's own restrictions under this name while it pins it to a worker."""
    import inspect

    from distributed.shuffle import _scheduler_plugin

    assert f'"{internals._P2P}"' in inspect.getsource(_scheduler_plugin)


def test_prefer_workers(bed: Bed) -> None:
    first = bed.workers()[0]

    class Prefer(SchedulerPlugin):
        name = "prefer"

        def update_graph(self, scheduler: Any, *, tasks: list[Any], **kwargs: Any) -> None:
            for key in tasks:
                internals.prefer_workers(scheduler.tasks[key], [first] if key != "nowhere" else ["tcp://127.0.0.1:1"])

    bed.on_scheduler(lambda s: s.add_plugin(Prefer()))
    futures = [bed.client.submit(plus, i, key=f"near-{i}") for i in range(4)]
    nowhere = bed.client.submit(plus, 5, key="nowhere")
    wait(futures)
    assert {w for holders in bed.client.who_has(futures).values() for w in holders} == {first}
    assert nowhere.result(timeout=support.DEADLINE_S) == 5
    bed.on_scheduler(lambda s: s.remove_plugin("prefer"))


def test_pseudo_clients(bed: Bed) -> None:
    """A key that only a pseudo client wants stays, and goes with that client."""
    x = bed.client.submit(plus, 1, key="x")
    wait(x)
    bed.on_scheduler(lambda s: internals.keep_keys(s, ["x"], "veloc-test"))
    bed.validate()
    other = bed.client.submit(plus, 2, key="other")
    del x
    support.until(lambda: bed.on_scheduler(lambda s: len(s.tasks["x"].who_wants) == 1), "the client has let go of x")
    other.result()
    assert "x" in bed.tasks()
    bed.validate()
    bed.on_scheduler(lambda s: internals.forget_pseudo_client(s, "veloc-test"))
    assert "x" not in bed.tasks()
    assert bed.on_scheduler(lambda s: "veloc-test" not in s.clients)
    bed.on_scheduler(lambda s: internals.forget_pseudo_client(s, "veloc-test"))  # once more does no harm


def test_group_exists(bed: Bed) -> None:
    x = bed.client.submit(plus, 1, key="some-prefix-1")
    wait(x)
    assert bed.on_scheduler(lambda s: internals.group_exists(s, "some-prefix"))
    assert not bed.on_scheduler(lambda s: internals.group_exists(s, "another"))
    del x
    support.until(lambda: not bed.on_scheduler(lambda s: internals.group_exists(s, "some-prefix")), "the group goes")


# -- values on a worker --------------------------------------------------------------------------------------------------


def peek(bed: Bed, worker: str, key: Any) -> tuple[Any, bool]:
    """The value of a key on a worker, and whether it came from a spill file."""

    def look(dask_worker: Any) -> tuple[Any, bool]:
        found = internals.peek(dask_worker, key)
        return (found.load(), True) if isinstance(found, internals.Spilled) else (found, False)

    return bed.client.run(look, workers=[worker])[worker]


def layers(bed: Bed, worker: str) -> tuple[list[Any], list[Any]]:
    """The keys in memory, the least recently used first, and those on disk."""

    def held(dask_worker: Any) -> tuple[list[Any], list[Any]]:
        return list(dask_worker.data.fast.order), sorted(dask_worker.data.slow)

    return bed.client.run(held, workers=[worker])[worker]


def test_peek(bed: Bed) -> None:
    """Values in memory and on disk are seen as they are, and stay where they are, in their order."""
    worker = bed.workers()[0]
    futures = {
        f"value-{i}": bed.client.submit(np.full, 500_000, float(i), key=f"value-{i}", workers=[worker])
        for i in range(6)
    }
    wait(list(futures.values()))
    before = layers(bed, worker)
    assert before[0]
    assert before[1], "nothing is spilled: Dask has changed how the limits work"
    for key in futures:
        value, spilled = peek(bed, worker, key)
        assert (value == float(key.removeprefix("value-"))).all()
        assert value.shape == (500_000,)
        assert spilled == (key in before[1])
    assert layers(bed, worker) == before
    with pytest.raises(KeyError):
        peek(bed, worker, "no such key")


def test_a_spilled_value_can_be_read_after_dask_deletes_it(bed: Bed) -> None:
    worker = bed.workers()[0]
    futures = [bed.client.submit(np.full, 500_000, float(i), key=f"value-{i}", workers=[worker]) for i in range(6)]
    wait(futures)
    key = layers(bed, worker)[1][0]
    held: list[internals.Spilled] = []

    def take(dask_worker: Any) -> None:
        found = internals.peek(dask_worker, key)
        assert isinstance(found, internals.Spilled)
        held.append(found)

    (instance,) = [w for w in bed.cluster.workers.values() if w.address == worker]
    take(instance)
    assert held[0].nbytes > 4_000_000
    futures.clear()
    support.until(lambda: not layers(bed, worker)[1], "Dask has deleted the spill files")
    assert (held[0].load() == float(key.removeprefix("value-"))).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        held[0].load()


def test_peek_without_spilling() -> None:
    class Plain:
        data = {"k": 1}  # noqa: RUF012

    assert internals.peek(Plain(), "k") == 1  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        internals.peek(Plain(), "l")  # type: ignore[arg-type]
