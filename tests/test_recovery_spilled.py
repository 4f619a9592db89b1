"""Values that Dask has spilled to disk are saved from there, and stay there."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import wait

import support
from support import Bed, counts

pytestmark = pytest.mark.timeout(90)

# 10 MB of values are held in memory, the rest is on disk; what the process itself uses plays no part
BED: dict[str, Any] = {
    "n_workers": 2,
    "memory_limit": "500 MB",
    "config": {
        "distributed.worker.memory.target": 0.02,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
    },
}
NUMBER = 16
SIZE = 500_000  # a block of 4 MB


def in_memory_and_on_disk(bed: Bed) -> dict[str, tuple[set[str], set[str]]]:
    def held(dask_worker: Any) -> tuple[set[str], set[str]]:
        return set(map(str, dask_worker.data.fast)), set(map(str, dask_worker.data.slow))

    return bed.client.run(held)


def assert_right(x: Any) -> None:
    for i in range(NUMBER):  # one by one: all of it at once would not be what the limit is for
        np.testing.assert_array_equal(x.blocks[i].compute(), np.arange(i * SIZE, (i + 1) * SIZE) + 1.0)


@pytest.mark.parametrize("how", ["save", "protect"])
def test_they_stay_spilled(bed: Bed, log: str, how: str) -> None:
    x = support.counted(da.arange(NUMBER * SIZE, chunks=SIZE, dtype=float), log, "x").persist()
    wait(x)
    keys = set(map(str, support.keys_of(x)))
    support.until(
        lambda: all(fast | slow <= keys for fast, slow in in_memory_and_on_disk(bed).values()), "the inputs are gone"
    )
    before = in_memory_and_on_disk(bed)
    assert all(len(fast) and len(slow) for fast, slow in before.values())

    ck = bed.checkpointer()
    if how == "save":
        h = ck.save(x)
        h.wait("durable", timeout=support.DEADLINE_S)
    else:
        ck.protect(x)
        support.until(lambda: len(ck.protected()) == NUMBER and all(ck.protected().values()), "all is protected")

    assert in_memory_and_on_disk(bed) == before
    assert bed.client.run(lambda dask_worker: dask_worker.state.validate_state() or True)
    worker = bed.holder(x)
    spilled = len(before[worker][1])
    lost = bed.kill_holder(x)
    assert lost >= spilled > 0
    assert_right(x)
    assert set(counts(log).values()) == {1}
    if how == "save":
        assert_right(ck.restore())


def test_objects_and_frames(bed: Bed) -> None:
    """Spilled values of other types come through Dask's own serialisation."""
    pd = pytest.importorskip("pandas")
    values = [
        pd.DataFrame({"n": np.arange(100_000) + i, "s": [f"{i} {j}" for j in range(100_000)], "i": i}) for i in range(6)
    ]
    values += [{"deep": [b"x" * 3_000_000, i]} for i in range(6)]
    futures = bed.client.scatter(values, hash=False)
    support.until(lambda: sum(len(slow) for _, slow in in_memory_and_on_disk(bed).values()) > 2, "some are spilled")
    before = in_memory_and_on_disk(bed)
    ck = bed.checkpointer()
    ck.save(futures).wait("durable", timeout=support.DEADLINE_S)
    assert in_memory_and_on_disk(bed) == before
    bed.kill_holder(futures)
    for future, value in zip(futures, values, strict=True):
        if isinstance(value, dict):
            assert future.result() == value
        else:
            pd.testing.assert_frame_equal(future.result(), value)
