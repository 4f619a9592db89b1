"""What ``restore`` promises: what was saved, exactly, in another cluster, from whatever copy is left, or a clear error."""

from __future__ import annotations

import os
import pathlib

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.utils import assert_eq
from distributed import Client, LocalCluster, wait

import veloc_dask as vd
from veloc_dask.scheduler_plugin.worker import VelocWorker


def cluster(n_workers, **options):
    return LocalCluster(
        n_workers=n_workers, threads_per_worker=1, dashboard_address=":0", memory_limit="2GiB", **options
    )


@pytest.fixture(scope="module")
def threads():
    with cluster(2, processes=False) as workers, Client(workers) as client:
        yield client


def blocks_of(root, directory):
    """The block files of an item below a version's directory."""
    found = [p for p in pathlib.Path(root).rglob("*") if p.is_file() and f"/{directory}/c" in p.as_posix()]
    assert found
    return sorted(found)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_value():
    irregular = da.concatenate([da.full((k, 7), k, dtype=">f4", chunks=(k, 3)) for k in (3, 2, 4)])
    unknown = da.arange(100, chunks=10)
    frame = pd.DataFrame(
        {
            "a": np.arange(50),
            "c": pd.Categorical(list("abcde") * 10),
            "t": pd.date_range("2024-01-01", periods=50, tz="Europe/Paris"),
            "s": [None, "x"] * 25,
            "n": pd.array([1, None] * 25, dtype="Int64"),
        },
        index=pd.Index(np.arange(50) * 2, name="k"),
    )
    ddf = dd.from_pandas(frame, npartitions=4)
    value = {
        "irregular": irregular,
        "unknown": unknown[unknown % 3 == 0],
        "regular": da.random.default_rng(3).random((10, 9), chunks=(4, 3)),
        "empty": da.zeros((0, 3), chunks=(1, 2)),
        "zero chunk": da.from_array(np.arange(5), chunks=((2, 0, 3),)),
        "0-d": da.from_array(np.float32(2.5)),
        "objects": da.from_array(np.array([None, "x", {1: 2}], dtype=object), chunks=2),
        "masked": da.ma.masked_array(np.arange(6.0), mask=[0, 1, 0, 0, 1, 0]).rechunk(3),
        "structured": da.from_array(np.array([(1, 2.5), (3, 4.5)], dtype=[("i", "<i4"), ("f", ">f8")]), chunks=1),
        "dates": da.from_array(np.array(["2024-01-01", "NaT"], dtype="M8[s]"), chunks=1),
        "frame": ddf,
        "series": ddf["a"],
        "index": ddf.index,
        "filtered": ddf[ddf.a > 30],
        "no divisions": ddf.clear_divisions(),
        "by time": dd.from_pandas(frame.set_index("t"), npartitions=3),
        "bag": db.from_sequence(range(10), npartitions=3),
    }
    return value, frame


def check_value(state, value, frame):
    for key in ("irregular", "regular", "empty", "zero chunk", "0-d", "objects", "structured", "dates"):
        assert state[key].chunks == value[key].chunks, key
        assert state[key].dtype == value[key].dtype, key
        got, expected = state[key].compute(), value[key].compute()
        assert got.dtype == expected.dtype, key
        np.testing.assert_array_equal(got, expected)
    assert np.isnan(state["unknown"].chunks[0][0])
    np.testing.assert_array_equal(state["unknown"].compute(), np.arange(0, 100, 3))
    masked = state["masked"].compute()
    assert isinstance(masked, np.ma.MaskedArray)
    np.testing.assert_array_equal(masked.mask, [0, 1, 0, 0, 1, 0])
    assert_eq(state["frame"], frame, check_divisions=True)
    for key in ("frame", "series", "index", "filtered", "no divisions", "by time"):
        assert type(state[key]) is type(value[key])
        assert state[key].divisions == value[key].divisions, key
        assert state[key].npartitions == value[key].npartitions, key
        assert_eq(state[key], value[key])
    assert state["bag"].compute() == list(range(10))


def test_every_kind_comes_back_in_a_new_cluster_with_fewer_and_with_more_workers(tmp_path):
    where = {"local": tmp_path / "local", "remote": tmp_path / "remote"}
    value, frame = make_value()
    with cluster(2) as workers, Client(workers) as client:
        vd.Checkpointer(client, "kinds", **where).save(value).wait("durable", timeout=60)
    for n in (1, 4):
        with cluster(n) as workers, Client(workers) as client:
            state = vd.Checkpointer(client, "kinds", **where).restore()
            check_value(state, value, frame)


def test_from_the_node_local_tiers_of_a_dead_cluster(tmp_path):
    tiers = [tmp_path / "fast", tmp_path / "slow"]
    x = np.random.default_rng(1).random((20, 20))
    with cluster(2) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "dead", local=tiers)
        ck.save({"x": da.from_array(x, chunks=5), "step": 3}).wait("local", timeout=60)
    with cluster(1) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "dead", local=tiers)
        assert [(v.version, v.level) for v in ck.versions()] == [(1, "local")]
        state = ck.restore()
        np.testing.assert_array_equal(state["x"].compute(), x)
        assert state["step"] == 3
        assert ck.save({"step": 4}).version == 2


def test_a_local_version_with_a_missing_block_is_reported_and_not_restored(threads, tmp_path):
    ck = vd.Checkpointer(threads, "holes", local=tmp_path)
    ck.save({"x": da.ones(8, chunks=2)}).wait("local", timeout=30)
    ck.save({"x": da.zeros(8, chunks=2)}).wait("local", timeout=30)
    newest = next(d for d in (tmp_path).rglob("v00000002-*") if d.is_dir())
    (newest / "x" / "c" / "1").unlink()
    assert [(v.version, v.level) for v in ck.versions()] == [(1, "local"), (2, "incomplete")]
    with pytest.warns(RuntimeWarning, match=r"version 2 is newer but incomplete: 1 of 4 blocks are on no tier"):
        state = ck.restore()
    assert float(state["x"].sum().compute()) == 8
    with pytest.raises(vd.BlockLost, match="version 2 is incomplete"):
        ck.restore(2)


def test_when_the_flush_had_not_ended_the_local_tiers_serve(tmp_path):
    """The remote tier vanishes before the flush: the version stays local, and a new cluster on the node restores it."""
    where = {"local": tmp_path / "local", "remote": tmp_path / "remote"}
    with cluster(2) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "unflushed", **where)
        os.rmdir(tmp_path / "remote")
        (tmp_path / "remote").write_text("not a directory any more")
        handle = ck.save({"x": da.arange(12, chunks=3)})
        handle.wait("local", timeout=60)
        with pytest.raises(vd.TierError, match="flush to"):
            handle.wait("durable", timeout=60)
        assert handle.level == "local"
    (tmp_path / "remote").unlink()
    with cluster(1) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "unflushed", **where)
        np.testing.assert_array_equal(ck.restore()["x"].compute(), np.arange(12))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_a_damaged_copy_falls_through_to_the_next_one(threads, tmp_path, damage):
    ck = vd.Checkpointer(threads, f"damaged-{damage}", local=tmp_path / "local", remote=tmp_path / "remote")
    ck.save({"x": da.arange(12, chunks=3), "o": {1, 2}}).wait("durable", timeout=30)
    for path in [*blocks_of(tmp_path / "local", "x"), *blocks_of(tmp_path / "local", "o")]:
        if damage == "flip":
            flip(path)
        elif damage == "truncate":
            os.truncate(path, path.stat().st_size - 1)
        elif damage == "empty":
            os.truncate(path, 0)
        else:
            path.unlink()
    state = ck.restore()
    assert state["o"] == {1, 2}
    np.testing.assert_array_equal(state["x"].compute(), np.arange(12))
    if damage != "delete":  # set aside, so that nobody reads it again
        assert not [p for p in blocks_of(tmp_path / "local", "x") if not p.name.startswith(".bad-")]


def test_all_copies_damaged_is_an_error_that_says_so(threads, tmp_path):
    ck = vd.Checkpointer(threads, "all-damaged", local=tmp_path / "local", remote=tmp_path / "remote")
    ck.save({"x": da.arange(12, chunks=3), "y": da.ones(3)}).wait("durable", timeout=30)
    assert ck.verify()["problems"] == []
    for root in ("local", "remote"):
        flip(blocks_of(tmp_path / root, "x")[1])
    problems = ck.verify()["problems"]
    assert len(problems) == 1
    assert "x/c/1" in problems[0]
    state = ck.restore()
    with pytest.raises(vd.BlockLost, match=r"x/c/1.*tier .*remote "):
        state["x"].compute()
    assert float(state["y"].sum().compute()) == 3
    np.testing.assert_array_equal(state["x"][:3].compute(), np.arange(3))


def test_a_damaged_root_or_table_is_found(threads, tmp_path):
    ck = vd.Checkpointer(threads, "roots", local=tmp_path / "local", remote=tmp_path / "remote", keep=5)
    for step in (1, 2, 3):
        ck.save({"x": da.full(4, step, chunks=2)}).wait("durable", timeout=30)
    for path in pathlib.Path(tmp_path / "local").rglob("root.json"):
        path.unlink()
    flip(tmp_path / "remote" / "roots" / "v00000003.json")
    assert ck.latest() == 2
    segment = next((tmp_path / "remote" / "roots").glob("v00000002-*/table/00000.seg"))
    flip(segment)
    with pytest.raises(vd.IntegrityError, match="block table is torn or was changed"):
        ck.restore(2)
    assert float(ck.restore(1)["x"].sum().compute()) == 4


def test_select_persist_and_default(threads, tmp_path):
    ck = vd.Checkpointer(threads, "options", local=tmp_path / "local", remote=tmp_path / "remote")
    assert ck.restore(default="none yet") == "none yet"
    with pytest.raises(vd.CheckpointNotFound, match="complete versions: none"):
        ck.restore()
    ck.save({"x": da.ones(4, chunks=2), "y": {"z": [1, 2]}, "w": 3}).wait("durable", timeout=30)
    assert ck.restore(select=["y"]) == {"y": {"z": [1, 2]}}
    with pytest.raises(vd.CheckpointNotFound, match="no item 'q'; it has 'x', 'y', 'w'"):
        ck.restore(select="q")
    persisted = ck.restore(persist=True)["x"]
    wait(persisted)
    assert float(persisted.sum().compute()) == 4
    assert ck.restore(7, default=None) is None


def test_a_restore_is_lazy_and_one_task_per_block(threads, tmp_path):
    ck = vd.Checkpointer(threads, "lazy", local=tmp_path / "local", remote=tmp_path / "remote")
    ck.save({"x": da.ones(100, chunks=10)}).wait("durable", timeout=30)
    x = ck.restore()["x"]
    assert not [
        k for k in threads.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)) if k[0] == x.name
    ]
    assert len(dict(x.__dask_graph__())) == 10
    for path in blocks_of(tmp_path, "x"):
        if path.name != "0":
            path.unlink()
    assert float(x[:10].sum().compute()) == 10  # only the block that is needed is read


def test_restored_blocks_that_are_lost_are_loaded_again(tmp_path):
    with cluster(2) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "again", local=tmp_path / "local", remote=tmp_path / "remote")
        ck.save({"x": da.arange(12, chunks=3)}).wait("durable", timeout=30)
        x = ck.restore(persist=True)["x"]
        wait(x)
        client.restart_workers(list(client.scheduler_info()["workers"])[:1])
        np.testing.assert_array_equal(x.compute(), np.arange(12))


def test_a_worker_that_joins_later_takes_part(tmp_path):
    with cluster(1) as workers, Client(workers) as client:
        ck = vd.Checkpointer(client, "joining", local=tmp_path / "local", remote=tmp_path / "remote")
        workers.scale(3)
        client.wait_for_workers(3, timeout=30)
        x = da.arange(30, chunks=3)
        ck.save({"x": x}).wait("durable", timeout=30)
        opened = client.run(lambda dask_worker: list(dask_worker.plugins[VelocWorker.name].spaces))
        assert list(opened.values()) == [["joining"]] * 3
        np.testing.assert_array_equal(ck.restore()["x"].compute(), np.arange(30))


def test_a_default_is_not_taken_for_versions_that_cannot_be_read(threads, tmp_path):
    ck = vd.Checkpointer(threads, "unreadable", local=tmp_path / "local", remote=tmp_path / "remote")
    for step in (1, 2):
        ck.save({"step": step}).wait("durable", timeout=30)
    ck.close()
    for path in pathlib.Path(tmp_path / "local").rglob("root.json"):
        path.unlink()
    ck = vd.Checkpointer(threads, "unreadable", local=tmp_path / "local", remote=tmp_path / "remote")
    flip(tmp_path / "remote" / "unreadable" / "v00000002.json")
    with pytest.warns(RuntimeWarning, match="cannot be read is passed over"):
        assert ck.restore(default="from nothing") == {"step": 1}
    flip(tmp_path / "remote" / "unreadable" / "v00000001.json")
    with pytest.raises(vd.IntegrityError, match="no complete version can be read"):
        ck.restore(default="from nothing")
    os.rename(tmp_path / "remote", tmp_path / "elsewhere")
    with pytest.raises(vd.TierError, match="is not there any more"):
        ck.restore(default="from nothing")
