"""The cluster changes while blocks come back: more deaths, restarts, retirements, and Dask moving replicas around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.client import futures_of

import support
import veloc_dask as vd
from support import Bed, counts

pytestmark = pytest.mark.timeout(120)

# the Active Memory Manager drops surplus replicas all the time
BED = {
    "config": {
        "distributed.scheduler.active-memory-manager.start": True,
        "distributed.scheduler.active-memory-manager.interval": "100ms",
    }
}
EXPECTED = support.field() + 1


def saved_rows(bed: Bed, log: str, level: str = "durable") -> Any:
    h = bed.checkpointer().save(support.rows(log, "x"))
    h.wait(level, timeout=support.DEADLINE_S)
    return h.value


def loading(bed: Bed) -> list[str]:
    """The workers that a loader has been sent to."""

    def find(scheduler: Any) -> list[str]:
        standing = scheduler.plugins["veloc"].recovery._standing
        return [ts.processing_on.address for k in standing if (ts := scheduler.tasks[k]).processing_on is not None]

    return bed.on_scheduler(find)


def test_a_second_worker_dies_while_loaders_run(bed: Bed, log: str, tmp_path: Path) -> None:
    x = saved_rows(bed, log)
    with bed.held("read", gate=tmp_path / "gate") as release:
        bed.kill_holder(x)
        (worker, *_) = support.until(lambda: loading(bed), "a loader runs")
        bed.validate()
        bed.kill(worker)
        bed.validate()
        release()
        np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_workers_that_die_under_loaders_again_and_again(bed: Bed, log: str, tmp_path: Path) -> None:
    """A snapshot that kills whoever reads it must not take the cluster down: Dask computes the block."""
    x = bed.client.submit(support.combine, 1, log=log, tag="x")
    h = bed.checkpointer().save(x)
    h.wait("durable", timeout=support.DEADLINE_S)
    with bed.held("read", gate=tmp_path / "gate"):
        bed.kill(bed.holder([x]))
        for _ in range(2):
            (worker,) = support.until(lambda: loading(bed), "the loader runs")
            bed.kill(worker)
        assert x.result(timeout=support.DEADLINE_S) == 1
    assert counts(log) == {"x": 2}
    assert not bed.held_lineages()


@pytest.mark.slow
def test_all_workers_one_after_the_other(bed: Bed, log: str) -> None:
    x = saved_rows(bed, log)
    for worker in bed.workers():
        bed.kill(worker)
        bed.settle()
        np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


@pytest.mark.parametrize("level", ["local", "durable"])
def test_all_workers_at_once(bed: Bed, log: str, level: str) -> None:
    x = saved_rows(bed, log, level)
    bed.kill(*bed.workers())
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_scattered_data_when_all_workers_die(bed: Bed) -> None:
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    bed.checkpointer().save(futures).wait("local", timeout=support.DEADLINE_S)
    bed.kill(*bed.workers())
    assert [int(v[0]) for v in bed.client.gather(futures)] == list(range(9))


def test_restart_in_mid_save(bed: Bed, log: str, tmp_path: Path) -> None:
    ck = bed.checkpointer()
    with bed.held("local", gate=tmp_path / "gate") as release:
        h = ck.save(support.rows(log, "x"))
        wait(h.value)
        bed.client.restart(wait_for_workers=False)
        with pytest.raises(vd.BlockLost, match=r"restarted|cancelled or lost"):
            h.wait("local", timeout=support.DEADLINE_S)
        release()
    bed.settle()
    bed.validate()
    assert ck.versions() == []
    support.until(lambda: not bed.files(ck, "local", "remote"), "the attempt is removed")
    h = ck.save(support.rows(log, "again"))
    h.wait("durable", timeout=support.DEADLINE_S)
    bed.kill_holder(h.value)
    np.testing.assert_array_equal(h.value.compute(), EXPECTED)
    assert {n for t, n in counts(log).items() if t.startswith("again")} == {1}


def test_restart_after_a_save(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    h = ck.save(support.rows(log, "x"))
    h.wait("durable", timeout=support.DEADLINE_S)
    bed.client.restart()
    bed.settle()
    assert ck.latest() == 1
    np.testing.assert_array_equal(ck.restore().compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_restart_between_capture_and_flush(bed: Bed, log: str, tmp_path: Path) -> None:
    """A version that is local needs no keys any more: it becomes durable after a restart."""
    ck = bed.checkpointer()
    with bed.held("remote", gate=tmp_path / "gate") as release:
        h = ck.save(support.rows(log, "x"))
        h.wait("local", timeout=support.DEADLINE_S)
        bed.client.restart()
        release()
        h.wait("durable", timeout=support.DEADLINE_S)
    np.testing.assert_array_equal(ck.restore(1).compute(), EXPECTED)


def test_restart_while_loaders_run(bed: Bed, log: str, tmp_path: Path) -> None:
    y = support.counted(support.rows(log, "x").rechunk((2, 64)), log, "y")
    h = bed.checkpointer().save(y)
    h.wait("durable", timeout=support.DEADLINE_S)
    with bed.held("read", gate=tmp_path / "gate"):
        bed.kill_holder(h.value)
        support.until(bed.held_lineages, "loaders stand in")
        bed.client.restart(wait_for_workers=False)
        assert not bed.tasks()
    bed.settle()


def test_retired_in_mid_save(bed: Bed, log: str, tmp_path: Path) -> None:
    """What a retired worker held is copied by Dask, what it had captured is on the node's tiers."""
    bed.settle()
    worker, process = bed.start_other_worker()
    bed.checkpointer()
    bed.settle()
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.05):
        x = support.rows(log, "x", number=16).persist(workers=[worker], allow_other_workers=True)
        wait(x)
        h = ck.save(x)
        bed.client.retire_workers([worker])
        h.wait("durable", timeout=support.DEADLINE_S)
    support.until(lambda: worker not in bed.workers(), "the worker is gone")
    process.wait(timeout=support.DEADLINE_S)
    np.testing.assert_array_equal(x.compute(), support.field(16) + 1)
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), support.field(16) + 1)
    assert set(counts(log).values()) == {1}
    assert ck.verify()["problems"] == []


def test_replicated_and_rebalanced(bed: Bed, log: str) -> None:
    """Replicas come and go while the version is saved; a block is captured once, and lost only with its last replica."""
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.02):
        h = ck.save(support.rows(log, "x", number=16))
        x = h.value
        wait(x)
        bed.client.replicate(futures_of(x), n=2)
        bed.client.rebalance(futures_of(x))
        h.wait("durable", timeout=support.DEADLINE_S)
    assert len(bed.files(ck, "remote")) == 16
    for worker in bed.workers()[:2]:
        bed.client.replicate(futures_of(x), n=3)
        bed.kill(worker)
        np.testing.assert_array_equal(x.compute(), support.field(16) + 1)
    assert set(counts(log).values()) == {1}
