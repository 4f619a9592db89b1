"""Snapshots that cannot be read: another copy is taken, else Dask's lineage, else the error says what is lost.

A damaged copy never reaches a result, and a loader that cannot do it never runs for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest

import support
import veloc_dask as vd
from support import Bed, counts

pytestmark = pytest.mark.timeout(90)


def truncate(paths: list[Path]) -> int:
    for path in paths:
        path.write_bytes(path.read_bytes()[:-7])
    return len(paths)


def empty(paths: list[Path]) -> int:
    for path in paths:
        path.write_bytes(b"")
    return len(paths)


def zero(paths: list[Path]) -> int:
    for path in paths:
        path.write_bytes(bytes(path.stat().st_size))
    return len(paths)


def delete(paths: list[Path]) -> int:
    for path in paths:
        path.unlink()
    return len(paths)


DAMAGES = [support.flip, truncate, empty, zero, delete]


def saved_rows(bed: Bed, log: str) -> tuple[vd.Checkpointer, Any]:
    """Eight counted blocks in a durable version."""
    ck = bed.checkpointer()
    h = ck.save(support.rows(log, "x"))
    h.wait("durable", timeout=support.DEADLINE_S)
    assert len(bed.files(ck, "local")) == len(bed.files(ck, "remote")) == 8
    return ck, h.value


def same(x: Any) -> bool:
    return bool((x.compute() == support.field() + 1).all())


@pytest.mark.parametrize("damage", DAMAGES)
def test_local_copies_are_damaged(bed: Bed, log: str, damage: Callable[[list[Path]], int]) -> None:
    """The remote tier has good ones."""
    ck, x = saved_rows(bed, log)
    assert damage(bed.files(ck, "local")) == 8
    loaded = bed.stats()["loaded"]

    lost = bed.kill_holder(x)

    assert same(x)
    assert set(counts(log).values()) == {1}
    assert bed.stats()["loaded"] == loaded + lost


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_copies_are_damaged(bed: Bed, log: str, damage: Callable[[list[Path]], int]) -> None:
    """Dask computes the lost blocks, once, and no others."""
    ck, x = saved_rows(bed, log)
    assert damage(bed.files(ck, "local", "remote")) == 16
    before = bed.stats()
    worker = bed.holder(x)
    lost = {f"x{i}.{j}" for _, i, j in bed.sole_holdings(x)[worker]}
    assert lost

    bed.kill(worker)

    assert same(x)
    assert counts(log) == {t: 2 if t in lost else 1 for t in (f"x{i}.0" for i in range(8))}
    assert bed.stats()["back_to_lineage"] == before["back_to_lineage"] + len(lost)
    assert bed.stats()["loads"] == before["loads"] + len(lost)
    sent = bed.runs("add-")  # each lost one: at first, to a loader once, and to be computed again
    assert sum(sent[key] for key in support.keys_of(x)) == 8 + 2 * len(lost)
    assert not bed.held_lineages()


def test_remote_copies_are_damaged(bed: Bed, log: str) -> None:
    """The node's own copies are read first, so nobody notices."""
    ck, x = saved_rows(bed, log)
    support.flip(bed.files(ck, "remote"))
    bed.kill_holder(x)
    assert same(x)
    assert set(counts(log).values()) == {1}


def test_an_older_version_is_good(bed: Bed, log: str) -> None:
    """The newest snapshot of a key is damaged everywhere, one in an older version is not."""
    ck, x = saved_rows(bed, log)
    old = bed.files(ck, "local", "remote")
    ck.save(x).wait("durable", timeout=support.DEADLINE_S)
    new = set(bed.files(ck, "local", "remote")) - set(old)
    assert support.flip(new) == 16
    bed.kill_holder(x)
    assert same(x)
    assert set(counts(log).values()) == {1}


def test_saved_again_after_the_damage(bed: Bed, log: str) -> None:
    """Blocks that went back to their lineage are protected again by the next save."""
    ck, x = saved_rows(bed, log)
    support.flip(bed.files(ck, "local", "remote"))
    bed.kill_holder(x)
    assert same(x)
    bed.settle()
    before = counts(log)
    ck.save(x).wait("local", timeout=support.DEADLINE_S)
    bed.kill_holder(x)
    assert same(x)
    assert counts(log) == before


def test_a_long_lineage_takes_over(bed: Bed, log: str) -> None:
    """Released inputs of a block whose snapshots are damaged are computed too."""
    x = support.rows(log, "x")
    y = support.counted(x.rechunk((2, 64)), log, "y")
    ck = bed.checkpointer()
    h = ck.save(y)
    h.wait("durable", timeout=support.DEADLINE_S)
    y = h.value
    del x
    assert len(counts(log)) == 12
    support.flip(bed.files(ck, "local", "remote"))
    worker = bed.holder(y)
    lost = {i for _, i, _ in bed.sole_holdings(y)[worker]}
    bed.kill(worker)
    assert (y.compute() == support.field() + 2).all()
    again = {t for t, n in counts(log).items() if n == 2}
    assert again == {f"y{i}.0" for i in lost} | {f"x{i}.0" for j in lost for i in (2 * j, 2 * j + 1)}
    assert max(counts(log).values()) == 2


def test_scattered_data_that_is_lost_is_named(bed: Bed) -> None:
    futures = bed.client.scatter([np.full(100, i) for i in range(9)], hash=False)
    ck = bed.checkpointer()
    ck.save(futures).wait("durable", timeout=support.DEADLINE_S)
    support.flip(bed.files(ck, "local", "remote"))
    worker = bed.holder(futures)
    lost = bed.sole_holdings(futures)[worker]
    bed.kill(worker)

    errors = {f.key: f.exception(timeout=support.DEADLINE_S) for f in futures}
    for f in futures:
        if f.key in lost:
            assert isinstance(errors[f.key], vd.BlockLost)
            assert ck.name in str(errors[f.key])
            assert "no readable copy" in str(errors[f.key])
        else:
            assert errors[f.key] is None
            assert int(f.result()[0]) == futures.index(f)


def test_a_forgotten_sibling(bed: Bed, log: str) -> None:
    """y1 and y2 share x. While y1's loader stands in, y2 and x go; a damaged snapshot then still leads back through x."""
    x = bed.client.submit(support.combine, 1, log=log, tag="x")
    y1 = bed.client.submit(support.combine, x, 10, log=log, tag="y1")
    y2 = bed.client.submit(support.combine, x, 100, log=log, tag="y2")
    ck = bed.checkpointer()
    ck.save([y1, y2]).wait("durable", timeout=support.DEADLINE_S)
    del x
    assert y2.result() == 101
    del y2
    support.until(lambda: len(bed.tasks()) == 2, "only y1, and x for its sake, are left")
    support.flip(bed.files(ck, "local", "remote"))
    bed.kill(bed.holder([y1]))
    assert y1.result() == 11
    assert counts(log) == {"x": 2, "y1": 2, "y2": 1}


def test_a_sibling_that_is_forgotten_while_the_loader_runs(bed: Bed, log: str, tmp_path: Path) -> None:
    """The loader has no inputs: its stand-in alone keeps x known, and lets it go when y1 is loaded or forgotten."""
    x = bed.client.submit(support.combine, 1, log=log, tag="x")
    y1 = bed.client.submit(support.combine, x, 10, log=log, tag="y1")
    y2 = bed.client.submit(support.combine, x, 100, log=log, tag="y2")
    ck = bed.checkpointer()
    ck.save([y1, y2]).wait("durable", timeout=support.DEADLINE_S)
    del x
    with bed.held("read", gate=tmp_path / "gate") as release:
        support.flip(bed.files(ck, "local", "remote"))
        bed.kill(bed.holder([y1]))
        support.until(bed.held_lineages, "the loader stands in")
        gone = y2.key
        del y2
        support.until(lambda: gone not in bed.tasks(), "y2 is forgotten")
        release()
        assert y1.result(timeout=support.DEADLINE_S) == 11
    assert counts(log)["x"] == counts(log)["y1"] == 2
    assert not bed.held_lineages()


def test_a_key_that_is_forgotten_while_its_loader_runs(bed: Bed, log: str, tmp_path: Path) -> None:
    x = support.rows(log, "x")
    y = support.counted(x.rechunk((2, 64)), log, "y")
    h = bed.checkpointer().save(y)
    h.wait("durable", timeout=support.DEADLINE_S)
    y = h.value
    with bed.held("read", gate=tmp_path / "gate"):
        bed.kill_holder(y)
        support.until(bed.held_lineages, "the loaders stand in")
        bed.validate()
        del x, y, h
        support.until(lambda: not bed.tasks(), "everything is forgotten")


def test_a_version_is_deleted_while_its_keys_live(bed: Bed, log: str) -> None:
    """``delete`` takes the version out of the listings; its blocks stay as long as a live key may need them."""
    ck, x = saved_rows(bed, log)
    ck.delete(1)
    assert ck.versions() == []
    bed.kill_holder(x)
    assert same(x)
    assert set(counts(log).values()) == {1}


def test_a_version_is_pruned_while_its_keys_live(bed: Bed, log: str) -> None:
    ck = bed.checkpointer(keep=1)
    x = ck.save(support.rows(log, "x")).value
    for _ in range(3):
        h = ck.save({"other": da.ones(4, chunks=2)})
        h.wait("durable", timeout=support.DEADLINE_S)
    bed.kill_holder(x)
    assert same(x)
    assert set(counts(log).values()) == {1}
