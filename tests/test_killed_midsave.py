"""A worker dies while a version is captured, flushed or protected.

What had been captured by then is loaded, what had not is computed again, and the save goes on to a version that is whole.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import wait

import support
import veloc_dask as vd
from support import Bed, counts

pytestmark = pytest.mark.timeout(90)

NUMBER = 24  # blocks
EXPECTED = support.field(NUMBER) + 1


def tag(key: Any) -> str:
    return "x" + ".".join(map(str, key[1:]))


def assert_durable_and_whole(ck: vd.Checkpointer, handle: Any) -> None:
    handle.wait("durable", timeout=support.DEADLINE_S)
    assert handle.error is None
    assert ck.verify(handle.version)["problems"] == []
    np.testing.assert_array_equal(ck.restore(handle.version).compute(), EXPECTED)


@pytest.mark.parametrize("captured", [0, 5, 12, 20])
def test_while_blocks_are_captured(bed: Bed, log: str, captured: int) -> None:
    x = support.rows(log, "x", number=NUMBER).persist()
    wait(x)
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.1), bed.losses() as losses:
        h = ck.save(x)
        support.until(lambda: h.progress()["captured"] >= captured, "some blocks are captured")
        bed.kill_holder(x)
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        assert_durable_and_whole(ck, h)
    computed_again = Counter(tag(key) for key, had_snapshot in losses.seen if not had_snapshot)
    assert losses.seen
    assert computed_again or captured > 12
    assert counts(log) == {t: 1 + computed_again[t] for t in map(tag, support.keys_of(x))}


@pytest.mark.parametrize("captured", [1, 10])
def test_while_blocks_are_computed_and_captured(bed: Bed, log: str, captured: int) -> None:
    """A task that runs when its worker dies has been counted already: two runs are allowed for those."""
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.05), bed.losses() as losses:
        h = ck.save(support.rows(log, "x", number=NUMBER, pause_s=0.05))
        x = h.value
        support.until(lambda: h.progress()["captured"] >= captured, "some blocks are captured")
        bed.kill_holder(x)
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        assert_durable_and_whole(ck, h)
    had_snapshot = {tag(key) for key, had in losses.seen if had}
    had_none = {tag(key) for key, had in losses.seen if not had}
    found = counts(log)
    assert all(found[t] == 1 for t in had_snapshot - had_none)
    assert all(found[t] == 2 for t in had_none)
    running = {t for t, n in found.items() if n > 1} - had_none
    assert len(running) <= 2
    assert max(found.values()) == 2


def test_all_workers_while_blocks_are_captured(bed: Bed, log: str) -> None:
    x = support.rows(log, "x", number=NUMBER).persist()
    wait(x)
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.1), bed.losses() as losses:
        h = ck.save(x)
        support.until(lambda: h.progress()["captured"] >= 10, "some blocks are captured")
        bed.kill(*bed.workers())
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        assert_durable_and_whole(ck, h)
    computed_again = Counter(tag(key) for key, had_snapshot in losses.seen if not had_snapshot)
    assert counts(log) == {t: 1 + computed_again[t] for t in map(tag, support.keys_of(x))}
    assert 0 < computed_again.total() <= NUMBER - 10


@pytest.mark.parametrize("flushed", [0, 8])
def test_while_blocks_are_flushed(bed: Bed, log: str, flushed: int) -> None:
    """They lie on the node's tiers, and another worker of the node flushes them."""
    ck = bed.checkpointer()
    with bed.held("remote", pause_s=0.4):
        h = ck.save(support.rows(log, "x", number=NUMBER))
        x = h.value
        h.wait("local", timeout=support.DEADLINE_S)
        support.until(lambda: h.progress()["flushed"] >= flushed, "some blocks are flushed")
        bed.kill_holder(x)
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        assert_durable_and_whole(ck, h)
    assert set(counts(log).values()) == {1}


def test_all_workers_before_anything_is_flushed(bed: Bed, log: str, tmp_path: Path) -> None:
    ck = bed.checkpointer()
    with bed.held("remote", gate=tmp_path / "gate") as release:
        h = ck.save(support.rows(log, "x", number=NUMBER))
        x = h.value
        h.wait("local", timeout=support.DEADLINE_S)
        bed.kill(*bed.workers())
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        assert h.level == "local"
        release()
        assert_durable_and_whole(ck, h)
    assert set(counts(log).values()) == {1}


def test_all_workers_during_the_commit(bed: Bed, log: str, tmp_path: Path) -> None:
    """Whether the dead one had committed or not, the next one finds out."""
    ck = bed.checkpointer()
    ck.save({"first": 1}).wait("durable", timeout=support.DEADLINE_S)  # takes the run number
    gate = tmp_path / "gate"
    with bed.held("commit", gate=gate) as release:
        h = ck.save(support.rows(log, "x", number=NUMBER))
        x = h.value
        support.until(Path(f"{gate}.reached").exists, "a worker commits")
        bed.kill(*bed.workers())
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        release()
        assert_durable_and_whole(ck, h)
    assert set(counts(log).values()) == {1}


def test_all_futures_are_gone_before_anything_is_flushed(bed: Bed, log: str, tmp_path: Path) -> None:
    """Once a version is local it needs neither the values nor the workers that computed them."""
    ck = bed.checkpointer()
    with bed.held("remote", gate=tmp_path / "gate") as release:
        h = ck.save(support.rows(log, "x", number=NUMBER))
        h.wait("local", timeout=support.DEADLINE_S)
        h.value = None
        support.until(lambda: not bed.tasks(), "the values are forgotten")
        bed.kill(*bed.workers())
        release()
        assert_durable_and_whole(ck, h)
    assert set(counts(log).values()) == {1}


def test_the_futures_are_dropped_while_blocks_are_captured(bed: Bed, log: str, tmp_path: Path) -> None:
    """The save itself wants the keys until they are captured; a death in between makes Dask compute them for it."""
    ck = bed.checkpointer()
    with bed.held("local", gate=tmp_path / "gate") as release:
        h = ck.save(support.rows(log, "x", number=NUMBER))
        wait(h.value)
        worker = bed.holder(h.value)
        h.value = None
        bed.kill(worker)
        release()
        assert_durable_and_whole(ck, h)
    assert set(counts(log).values()) == {1, 2}
    support.until(lambda: not bed.tasks(), "the save has let go of its keys")


def test_scattered_data_that_was_not_captured(bed: Bed, tmp_path: Path) -> None:
    """Nobody can compute it again: the version fails, says which block it was, and leaves nothing behind."""
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    ck = bed.checkpointer()
    with bed.held("local", gate=tmp_path / "gate"):
        h = ck.save(futures)
        bed.kill(bed.holder(futures))
        with pytest.raises(vd.BlockLost, match=r"version 1, item .* was cancelled or lost before it was captured"):
            h.wait("local", timeout=support.DEADLINE_S)
    support.until(lambda: not bed.files(ck, "local", "remote"), "the attempt is removed")
    assert ck.versions() == []
    h = ck.save([1, 2])
    h.wait("durable", timeout=support.DEADLINE_S)
    assert ck.restore() == [1, 2]
