"""``protect``: the same recovery without a version, for as long as the keys live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import wait

import support
import veloc_dask as vd
from support import Bed, counts

pytestmark = pytest.mark.timeout(90)

EXPECTED = support.field() + 1


def until_protected(ck: vd.Checkpointer, number: int) -> None:
    def there() -> bool:
        protected = ck.protected()
        return len(protected) == number and all(protected.values())

    support.until(there, f"{number} keys are protected")


def test_persisted(bed: Bed, log: str) -> None:
    x = support.rows(log, "x").persist()
    wait(x)
    ck = bed.checkpointer()
    x = ck.protect(x)
    until_protected(ck, 8)
    assert ck.versions() == []
    for _ in range(2):
        bed.settle()
        bed.kill_holder(x)
        np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_lazy(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    x = ck.protect({"x": [support.rows(log, "x")]})["x"][0]
    until_protected(ck, 8)
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_without_a_remote(bed: Bed, log: str) -> None:
    ck = bed.checkpointer(remote=None)
    x = ck.protect(support.rows(log, "x"))
    until_protected(ck, 8)
    bed.kill(*bed.workers())
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_scattered(bed: Bed) -> None:
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    ck = bed.checkpointer()
    ck.protect(futures)
    until_protected(ck, 9)
    bed.kill_holder(futures)
    assert [int(v[0]) for v in bed.client.gather(futures)] == list(range(9))


def test_files_go_with_the_keys(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    x = ck.protect(support.rows(log, "x"))
    y = ck.protect(support.rows(log, "y"))
    until_protected(ck, 16)
    assert len(bed.files(ck, "local")) == 16
    del x
    support.until(lambda: len(bed.files(ck, "local")) == 8, "the files of x are gone")
    assert len(ck.protected()) == 8
    bed.kill_holder(y)
    np.testing.assert_array_equal(y.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}
    del y
    support.until(lambda: not bed.files(ck, "local"), "the files of y are gone")
    assert ck.protected() == {}


def test_unprotect(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    x = ck.protect(support.rows(log, "x"))
    until_protected(ck, 8)
    ck.unprotect(x)
    assert ck.protected() == {}
    support.until(lambda: not bed.files(ck, "local"), "the files are gone")
    lost = bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert sorted(counts(log).values()) == [1] * (8 - lost) + [2] * lost


def test_unprotected_while_it_is_captured(bed: Bed, log: str, tmp_path: Path) -> None:
    """A capture that ends after ``unprotect`` leaves no file and no snapshot behind."""
    ck = bed.checkpointer()
    with bed.held("local", gate=tmp_path / "gate") as release:
        x = ck.protect(support.rows(log, "x"))
        wait(x)
        ck.unprotect(x)
        release()
    other = ck.protect(support.rows(log, "other"))
    until_protected(ck, 8)
    support.until(lambda: len(bed.files(ck, "local")) == 8, "only the files of the other one are left")
    assert bed.stats()["snapshots"] == 8
    del other


def test_forgotten_while_it_is_captured(bed: Bed, log: str, tmp_path: Path) -> None:
    ck = bed.checkpointer()
    with bed.held("local", gate=tmp_path / "gate") as release:
        x = ck.protect(support.rows(log, "x"))
        wait(x)
        del x
        support.until(lambda: not bed.tasks(), "the keys are forgotten")
        release()
    other = ck.protect(support.rows(log, "other"))
    until_protected(ck, 8)
    support.until(lambda: len(bed.files(ck, "local")) == 8, "only the files of the other one are left")
    del other


def test_killed_while_protecting(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    with bed.held("local", pause_s=0.2), bed.losses() as losses:
        x = ck.protect(support.rows(log, "x"))
        support.until(lambda: any(ck.protected().values()), "some keys are protected")
        wait(x)
        bed.kill_holder(x)
        np.testing.assert_array_equal(x.compute(), EXPECTED)
        until_protected(ck, 8)
    again = sum(not had_snapshot for key, had_snapshot in losses.seen if key in support.keys_of(x))
    assert sum(counts(log).values()) == 8 + again
    bed.settle()
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert sum(counts(log).values()) == 8 + again


def test_protected_and_saved(bed: Bed, log: str) -> None:
    """Each of the two is enough."""
    ck = bed.checkpointer()
    x = ck.protect(support.rows(log, "x"))
    until_protected(ck, 8)
    ck.save(x).wait("durable", timeout=support.DEADLINE_S)
    protected = [f for f in bed.files(ck, "local") if any(p.startswith("protected-") for p in f.parts)]
    saved = set(bed.files(ck, "local", "remote")) - set(protected)
    assert len(protected) == 8
    assert support.flip(saved) == 16
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    ck.unprotect(x)
    bed.settle()
    ck.save(x).wait("durable", timeout=support.DEADLINE_S)
    bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert set(counts(log).values()) == {1}


def test_damaged(bed: Bed, log: str) -> None:
    ck = bed.checkpointer()
    x: Any = ck.protect(support.rows(log, "x"))
    until_protected(ck, 8)
    support.flip(bed.files(ck, "local"))
    lost = bed.kill_holder(x)
    np.testing.assert_array_equal(x.compute(), EXPECTED)
    assert sorted(counts(log).values()) == [1] * (8 - lost) + [2] * lost
