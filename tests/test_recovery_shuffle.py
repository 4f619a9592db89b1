"""A P2P shuffle is under way when a worker dies: Dask starts it again, from snapshots where there are some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import support
from support import Bed, counts

pytestmark = pytest.mark.timeout(120)

dd = pytest.importorskip("dask.dataframe")
pd = pytest.importorskip("pandas")

NUMBER = 6
TABLE = pd.DataFrame({"a": np.arange(3000) % 97, "b": np.arange(3000.0), "s": [f"row {i}" for i in range(3000)]})


def source(log: str) -> Any:
    df = dd.from_pandas(TABLE, npartitions=NUMBER)
    return df.map_partitions(support.same, log=log, tag="source", meta=TABLE.iloc[:0])


def feed(df: Any, log: str) -> Any:
    """Takes its time, so that the shuffle that follows is under way for a while."""
    return df.map_partitions(support.same, log=log, tag="feed", pause_s=0.4, meta=df._meta)


def assert_same(df: Any) -> None:
    found = df.compute()
    pd.testing.assert_frame_equal(found.sort_values("b", ignore_index=True), TABLE.astype(found.dtypes))


def until_shuffling(bed: Bed, log: str) -> None:
    """Some partitions are in the shuffle, others are not computed yet."""

    def under_way(scheduler: Any) -> bool:
        return any(t.state == "memory" and "shuffle-transfer" in str(k) for k, t in scheduler.tasks.items())

    support.until(lambda: counts(log).get("feed", 0) >= 2 and bed.on_scheduler(under_way), "the shuffle is under way")
    assert counts(log)["feed"] < NUMBER + 3


@pytest.mark.parametrize("how", ["local", "durable", "protect"])
def test_its_input_has_snapshots(bed: Bed, log: str, how: str) -> None:
    ck = bed.checkpointer()
    if how == "protect":
        df = ck.protect(source(log))
        support.until(lambda: len(ck.protected()) == NUMBER and all(ck.protected().values()), "all is protected")
    else:
        h = ck.save(source(log))
        df = h.value
        h.wait(how, timeout=support.DEADLINE_S)
    shuffled = feed(df, log).shuffle("a").persist()
    until_shuffling(bed, log)
    lost = bed.kill_holder(df)
    assert_same(shuffled)
    assert counts(log)["source"] == NUMBER
    assert bed.stats()["loaded"] >= lost


def test_results_of_an_earlier_one_are_saved(bed: Bed, log: str) -> None:
    """The second shuffle starts again, the first one does not."""
    ck = bed.checkpointer()
    before = bed.runs("shuffle-transfer")
    h = ck.save(source(log).shuffle("a").map_partitions(support.same, log=log, tag="first", meta=TABLE.iloc[:0]))
    first = h.value
    h.wait("durable", timeout=support.DEADLINE_S)
    of_first = set(bed.runs("shuffle-transfer")) - set(before)
    assert len(of_first) == NUMBER
    second = feed(first, log).shuffle("b").persist()
    until_shuffling(bed, log)
    bed.kill_holder(first)
    assert_same(second)
    assert counts(log)["source"] == counts(log)["first"] == NUMBER
    assert {bed.runs("shuffle-transfer")[key] for key in of_first} == {1}


def test_it_is_itself_being_saved(bed: Bed, log: str) -> None:
    """Nothing of it is captured yet; the save waits for the second try."""
    ck = bed.checkpointer()
    df = source(log).persist()
    h = ck.save(feed(df, log).shuffle("a"))
    until_shuffling(bed, log)
    bed.kill_holder(df)
    h.wait("durable", timeout=support.DEADLINE_S)
    assert_same(h.value)
    assert_same(ck.restore())


@pytest.mark.parametrize("level", ["local", "durable"])
def test_some_of_its_results_are_captured(bed: Bed, log: str, level: str) -> None:
    """Lost results are loaded, and neither the transfers nor the barrier run again, although others still use them."""
    ck = bed.checkpointer()
    h = ck.save(source(log).shuffle("a"))
    shuffled = h.value
    h.wait(level, timeout=support.DEADLINE_S)
    before = bed.runs("shuffle-transfer")
    after = shuffled.map_partitions(support.same, log=log, tag="after", pause_s=0.3, meta=TABLE.iloc[:0]).persist()
    support.until(lambda: "after" in counts(log), "the results are used")
    bed.kill_holder(shuffled)
    assert_same(after)
    assert counts(log)["source"] == NUMBER
    assert bed.runs("shuffle-transfer") == before
