"""A lost key is loaded on a worker that had computed it once, and has kept what it depended on."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import wait

from support import Bed, until

BED = {"n_workers": 2}  # so that it is loaded here and nowhere else

pytestmark = pytest.mark.timeout(120)


def one() -> int:
    return 1


def plus_one(a: int) -> int:
    return a + 1


def move(dask_scheduler: Any, key: str, away_from: str) -> None:
    dask_scheduler.request_remove_replicas(away_from, [key], stimulus_id="test")


@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "damaged"])
def test_it_was_computed_here_moved_away_and_its_dependent_stayed(bed: Bed, damaged: bool) -> None:
    client = bed.client
    there, here, *_ = bed.workers()
    options = {"workers": [here], "allow_other_workers": True, "pure": False}
    source = client.submit(one, **options)
    x = client.submit(plus_one, source, **options)
    y = client.submit(plus_one, x, **options)
    wait([x, y])
    del source
    ck = bed.checkpointer()
    ck.save({"x": x}).wait("durable", timeout=60)
    client.replicate([x], n=2, workers=[there, here])
    client.run_on_scheduler(move, key=x.key, away_from=here)
    until(lambda: list(client.who_has([x])[x.key]) == [there], "x is on the other worker only")
    if damaged:
        for path in bed.files(ck, "local", "remote"):
            path.write_bytes(bytes(path.stat().st_size))
    bed.kill(there)
    assert x.result(timeout=60) == 2
    assert y.result(timeout=60) == 3
