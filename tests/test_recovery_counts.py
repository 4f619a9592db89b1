"""P11: what has reached a level is loaded after a worker's death, and never computed again.

Every test kills the worker that alone holds most of the data with SIGKILL, and then counts how often each function has run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

import support
from support import Bed, counts

pytestmark = pytest.mark.timeout(90)

LEVELS = ("local", "durable")


@pytest.mark.parametrize("level", LEVELS)
def test_array_chain(bed: Bed, log: str, level: str) -> None:
    source = np.arange(48 * 48.0).reshape(48, 48)
    x = support.counted(da.from_array(source, chunks=12), log, "x")
    y = support.counted(x.rechunk((24, 12)), log, "y")
    z = support.counted(y.rechunk((12, 24)), log, "z")
    h = bed.checkpointer().save({"z": z})
    z = h.value["z"]
    h.wait(level, timeout=support.DEADLINE_S)
    before = counts(log)
    assert len(before) == 16 + 8 + 8
    assert set(before.values()) == {1}

    lost = bed.kill_holder(z)

    np.testing.assert_array_equal(z.compute(), source + 3)
    assert counts(log) == before
    assert bed.stats()["loaded"] >= lost
    assert not bed.held_lineages()


def test_array_without_a_remote(bed: Bed, log: str) -> None:
    x = support.rows(log, "x")
    h = bed.checkpointer(remote=None).save(x)
    h.wait("local", timeout=support.DEADLINE_S)
    x = h.value
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), support.field() + 1)
    assert set(counts(log).values()) == {1}


def test_array_with_a_remote_only(bed: Bed, log: str) -> None:
    x = support.rows(log, "x")
    h = bed.checkpointer(local=()).save(x)
    h.wait("durable", timeout=support.DEADLINE_S)
    x = h.value
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), support.field() + 1)
    assert set(counts(log).values()) == {1}


@pytest.mark.parametrize("level", LEVELS)
def test_dataframe_after_a_shuffle(bed: Bed, log: str, level: str) -> None:
    import dask.dataframe as dd
    import pandas as pd

    table = pd.DataFrame({"a": np.arange(4000) % 97, "b": np.arange(4000.0), "s": [f"row {i}" for i in range(4000)]})
    df = dd.from_pandas(table, npartitions=6).map_partitions(support.same, log=log, tag="source", meta=table.iloc[:0])
    earlier = bed.runs("shuffle-transfer")
    shuffled = df.shuffle("a").map_partitions(support.same, log=log, tag="after", meta=df._meta)
    h = bed.checkpointer().save({"df": shuffled})
    shuffled = h.value["df"]
    h.wait(level, timeout=support.DEADLINE_S)
    assert counts(log) == {"source": 6, "after": 6}
    transfers = bed.runs("shuffle-transfer") - earlier
    assert len(transfers) == 6
    assert set(transfers.values()) == {1}

    lost = bed.kill_holder(shuffled)

    found = shuffled.compute()
    pd.testing.assert_frame_equal(found.sort_values("b", ignore_index=True), table.astype(found.dtypes))
    assert counts(log) == {"source": 6, "after": 6}
    assert bed.runs("shuffle-transfer") - earlier == transfers
    assert bed.stats()["loaded"] >= lost


@pytest.mark.parametrize("level", LEVELS)
def test_delayed_layers(bed: Bed, log: str, level: str) -> None:
    run = dask.delayed(support.combine)
    first = [run(i, log=log, tag=f"first {i}") for i in range(12)]
    second = [run(a, 10, log=log, tag=f"second {i}") for i, a in enumerate(first)]
    third = [run(a, b, log=log, tag=f"third {i}") for i, (a, b) in enumerate(itertools.pairwise(second))]
    h = bed.checkpointer().save(third)
    third = h.value
    h.wait(level, timeout=support.DEADLINE_S)
    before = counts(log)
    assert len(before) == 12 + 12 + 11

    bed.kill_holder(third)

    assert list(dask.compute(*third)) == [2 * i + 21 for i in range(11)]
    assert counts(log) == before
    assert set(before.values()) == {1}


def test_scattered_data_is_lost_without_a_snapshot(bed: Bed) -> None:
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    bed.kill_holder(futures)
    support.until(lambda: any(f.cancelled() for f in futures), "Dask gives up on a future")


@pytest.mark.parametrize("level", LEVELS)
def test_scattered_data(bed: Bed, log: str, level: str) -> None:
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    h = bed.checkpointer().save(futures)
    h.wait(level, timeout=support.DEADLINE_S)
    for _ in range(2):  # it is armed again after it was loaded
        bed.settle()
        bed.kill_holder(futures)
        found = bed.client.gather(futures)
        assert [int(v[0]) for v in found] == list(range(9))
    used = bed.client.submit(support.combine, *futures, log=log, tag="used")
    assert int(used.result()[0]) == 36


@pytest.mark.parametrize("level", LEVELS)
def test_tasks_pinned_to_the_dead_worker(bed: Bed, log: str, level: str) -> None:
    bed.settle()
    worker, process = bed.start_other_worker()
    futures = [
        bed.client.submit(support.combine, i, log=log, tag=f"pinned {i}", workers=[worker], allow_other_workers=False)
        for i in range(4)
    ]
    wait(futures)
    h = bed.checkpointer().save(futures)
    h.wait(level, timeout=support.DEADLINE_S)

    # nanny first: the worker's address never comes back, and a task that is pinned to it could run nowhere
    pid = bed.pid(worker)
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may have seen its nanny die
        os.kill(pid, signal.SIGKILL)
    process.wait()

    assert bed.client.gather(futures) == [0, 1, 2, 3]
    assert worker not in bed.workers()
    assert counts(log) == {f"pinned {i}": 1 for i in range(4)}
    # and the restriction is back, for whoever computes it next
    assert bed.on_scheduler(lambda s: {w for f in futures for w in s.tasks[f.key].worker_restrictions}) == {worker}


def test_bag(bed: Bed, log: str) -> None:
    import dask.bag as db

    bag = db.from_sequence(range(24), npartitions=6).map_partitions(
        lambda part, log: (support.mark(log, f"bag {part[0]}"), [{"n": i, "s": str(i)} for i in part])[1], log=log
    )
    h = bed.checkpointer().save(bag)
    h.wait("local", timeout=support.DEADLINE_S)
    bag = h.value
    before = counts(log)
    bed.kill_holder(bag)
    assert bag.compute() == [{"n": i, "s": str(i)} for i in range(24)]
    assert counts(log) == before
    assert sorted(before.values()) == [1] * 6


@pytest.mark.parametrize("level", LEVELS)
def test_results_that_are_none(bed: Bed, log: str, level: str) -> None:
    futures = [bed.client.submit(support.nothing, i, log=log, tag=f"none {i}", pure=False) for i in range(8)]
    h = bed.checkpointer().save(futures)
    h.wait(level, timeout=support.DEADLINE_S)
    bed.kill_holder(futures)
    assert bed.client.gather(futures) == [None] * 8
    assert counts(log) == {f"none {i}": 1 for i in range(8)}


def test_dependents_under_way_go_on_from_snapshots(bed: Bed, log: str) -> None:
    """A task that waits for a lost block gets the loaded one."""
    x = support.rows(log, "x")
    h = bed.checkpointer().save(x)
    h.wait("local", timeout=support.DEADLINE_S)
    x = h.value
    y = support.counted(x, log, "y", pause_s=0.3).persist()
    support.until(lambda: any(t.startswith("y") for t in counts(log)), "a task runs")
    bed.kill_holder(x)
    np.testing.assert_array_equal(y.compute(), support.field() + 2)
    assert {n for t, n in counts(log).items() if t.startswith("x")} == {1}


def test_intermediate_results_that_nobody_wants(bed: Bed, log: str) -> None:
    """A saved block whose futures are gone, but which waiting tasks still need, is loaded as well."""
    x = support.rows(log, "x")
    h = bed.checkpointer().save(x)
    h.wait("local", timeout=support.DEADLINE_S)
    worker = bed.holder(h.value)
    y = support.counted(h.value, log, "y", pause_s=0.3).persist()
    support.until(lambda: any(t.startswith("y") for t in counts(log)), "a task runs")
    del x, h
    bed.kill(worker)
    np.testing.assert_array_equal(y.compute(), support.field() + 2)
    assert {n for t, n in counts(log).items() if t.startswith("x")} == {1}


def test_killed_twice(bed: Bed, log: str) -> None:
    """A loaded block is recovered again, and its lineage is whole in between."""
    x = support.rows(log, "x")
    y = support.counted(x.rechunk((2, 32)), log, "y")
    h = bed.checkpointer().save(y)
    h.wait("local", timeout=support.DEADLINE_S)
    y = h.value
    before = counts(log)
    edges = bed.on_scheduler(lambda s: {k: set(s.tasks[k].dependencies) for k in support.keys_of(y)})
    for _ in range(2):
        bed.settle()
        bed.kill_holder(y)
        np.testing.assert_array_equal(y.compute(), support.field() + 2)
        assert counts(log) == before
        assert not bed.held_lineages()
        assert edges == bed.on_scheduler(lambda s: {k: set(s.tasks[k].dependencies) for k in support.keys_of(y)})


def test_restored_data_is_saved_again(bed: Bed, log: str) -> None:
    """Restored blocks have their load task as lineage; a newer snapshot of them is as good."""
    x = support.rows(log, "x")
    first = bed.checkpointer()
    first.save(x).wait("durable", timeout=support.DEADLINE_S)
    del x
    restored = first.restore(persist=True)
    wait(restored)
    bed.kill_holder(restored)
    np.testing.assert_array_equal(restored.compute(), support.field() + 1)
    bed.settle()
    second = bed.checkpointer()
    second.save(restored).wait("durable", timeout=support.DEADLINE_S)
    bed.kill_holder(restored)
    np.testing.assert_array_equal(restored.compute(), support.field() + 1)
    bed.settle()
    support.flip(bed.files(second, "local", "remote"))
    bed.kill_holder(restored)
    np.testing.assert_array_equal(restored.compute(), support.field() + 1)
    assert set(counts(log).values()) == {1}


def test_other_futures_of_the_same_keys(bed: Bed, log: str) -> None:
    """What a second client gets for a recovered key is the loaded value."""
    from distributed import Client

    x: Any = support.rows(log, "x")
    h = bed.checkpointer().save(x)
    h.wait("durable", timeout=support.DEADLINE_S)
    x = h.value
    bed.kill_holder(x)
    bed.client.publish_dataset(x=x)
    with Client(bed.cluster.scheduler_address, set_as_default=False) as other:
        assert other.compute(other.get_dataset("x").sum()).result() == (support.field() + 1).sum()
    bed.client.unpublish_dataset("x")
    assert set(counts(log).values()) == {1}
