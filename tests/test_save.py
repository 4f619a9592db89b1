"""What ``save`` promises: it returns at once, computes nothing twice, takes values as they are, and reports every failure."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import veloc_dask as vd


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def ck(client, tmp_path, request):
    name = request.node.name.replace("[", "-").replace("]", "")[:100]
    checkpointer = vd.Checkpointer(client, name, local=tmp_path / "local", remote=tmp_path / "remote")
    yield checkpointer
    checkpointer.close()


class Counter:
    """Counts calls of a task function; the cluster's workers are threads of this process."""

    def __init__(self):
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, block):
        with self.lock:
            self.calls += 1
        return block + 1

    def __dask_tokenize__(self):
        return id(self)

    def __reduce__(self):  # stays one object although Dask pickles tasks
        return find_counter, (id(self),)


COUNTERS: dict[int, Counter] = {}


def find_counter(number):
    return COUNTERS[number]


@pytest.fixture
def counter():
    made = Counter()
    COUNTERS[id(made)] = made
    yield made
    del COUNTERS[id(made)]


def files_below(path):
    return [os.path.join(d, f) for d, _, fs in os.walk(path) for f in fs]


def test_lazy_collections_are_persisted_and_nothing_is_computed_twice(ck, counter):
    x = da.zeros((6, 6), chunks=2).map_blocks(counter, dtype=float)
    counter.calls = 0  # dask tries the function on an empty block first
    handle = ck.save({"x": x, "nested": [(x, 1)]})
    on = handle.value["x"]
    assert handle.value["nested"][0][0] is on
    assert float(on.sum().compute()) == 36
    handle.wait("durable", timeout=30)
    assert float((on + 1).sum().compute()) == 72
    assert counter.calls == 9


def test_a_persisted_collection_is_saved_as_it_is(ck, client):
    x = da.ones(10, chunks=3).persist()
    handle = ck.save(x)
    assert handle.value is x
    handle.wait("durable", timeout=30)
    assert ck.restore().chunks == x.chunks


def test_save_returns_before_the_values_exist(ck, client):
    gate = threading.Event()
    GATES[0] = gate
    future = client.submit(wait_for_gate, 0)
    handle = ck.save({"late": future})  # returns although the future cannot finish before the gate opens
    assert handle.level == "pending"
    with pytest.raises(TimeoutError, match="is pending; it goes on"):
        handle.wait("local", timeout=0.05)
    gate.set()
    handle.wait("local", timeout=30)


GATES: dict[int, threading.Event] = {}


def wait_for_gate(number):
    GATES[number].wait(60)
    return number


def test_plain_objects_are_taken_at_the_call(ck):
    state = {"history": [1, 2, {3}], "array": np.arange(4)}
    handle = ck.save(state)
    state["history"].append("later")
    state["array"][:] = -1
    handle.wait("durable", timeout=30)
    restored = ck.restore()
    assert restored["history"] == [1, 2, {3}]
    np.testing.assert_array_equal(restored["array"], np.arange(4))


def test_a_large_plain_object_does_not_travel_through_the_scheduler_message(ck):
    big = np.random.default_rng(0).random(1 << 18)  # 2 MiB, above the inline limit
    handle = ck.save({"big": big})
    expected = big.copy()
    big[:] = 0
    handle.wait("durable", timeout=30)
    np.testing.assert_array_equal(ck.restore()["big"], expected)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -5,
        2**60,
        2**200,
        1.5,
        float("inf"),
        -0.0,
        "text",
        "\ud800",
        b"bytes",
        1 + 2j,
        (1, [2, {"a": ()}]),
        {},
    ],
    ids=repr,
)
def test_plain_values_come_back_with_their_types(client, tmp_path, value):
    ck = vd.Checkpointer(client, f"plain-{abs(hash(repr(value)))}", local=tmp_path / "l", remote=tmp_path / "r")
    ck.save({"value": value, ("tuple", 1): value}).wait("durable", timeout=30)
    restored = ck.restore()
    for back in (restored["value"], restored["tuple", 1]):
        assert type(back) is type(value)
        assert repr(back) == repr(value)


def test_the_same_object_twice_is_stored_once(ck, tmp_path):
    x = da.ones(8, chunks=2).persist()
    ck.save({"a": x, "b": [x]}).wait("durable", timeout=30)
    restored = ck.restore()
    assert restored["a"].name == restored["b"][0].name
    assert sum("/c/" in f for f in files_below(tmp_path / "remote")) == 4


def test_levels_callbacks_and_progress(ck):
    seen = []
    handle = ck.save({"x": da.ones(10, chunks=1)})
    done = threading.Event()
    handle.add_done_callback("local", lambda h: seen.append("local"))
    handle.add_done_callback("durable", lambda h: (seen.append("durable"), done.set()))
    handle.wait("durable", timeout=30)
    assert done.wait(10)
    assert seen == ["local", "durable"]
    assert handle.error is None
    assert handle.done or handle.level == "durable"
    assert handle.progress()["captured"] == handle.progress()["flushed"] == 10
    assert "durable" in repr(handle)
    with pytest.raises(vd.ConfigError, match="expected 'local'"):
        handle.wait("everywhere")


def boom(block):
    raise ValueError("no luck")


def test_an_item_that_errs_fails_its_version_with_the_cause_and_leaves_nothing(ck, tmp_path):
    good = ck.save({"x": da.ones(4, chunks=2)})
    good.wait("durable", timeout=30)
    handle = ck.save({"good": da.ones(4, chunks=2), "bad": da.ones(4, chunks=2).map_blocks(boom, dtype=float)})
    with pytest.raises(vd.VelocError, match=r"item 'bad'.*no luck"):
        handle.wait("local", timeout=30)
    assert isinstance(handle.error, vd.VelocError)
    deadline = time.monotonic() + 20
    left = True
    while left and time.monotonic() < deadline:
        left = [f for f in files_below(tmp_path) if "v00000002" in f]
    assert not left
    assert ck.latest() == 1
    assert ck.save({"x": 1}).version == 2  # its number is free again


def test_a_cancelled_future_fails_the_save(ck, client):
    GATES[1] = threading.Event()
    future = client.submit(wait_for_gate, 1)
    handle = ck.save({"f": future})
    client.cancel([future], force=True)
    with pytest.raises(vd.BlockLost, match="was cancelled or lost before it was captured"):
        handle.wait("local", timeout=30)
    GATES[1].set()


def test_a_save_goes_on_when_its_futures_are_dropped(ck, client):
    x = da.ones(100, chunks=1).persist()
    wait(x)
    version = ck.save({"x": x}).version
    del x
    deadline = time.monotonic() + 30
    while ck.latest() != version and time.monotonic() < deadline:
        time.sleep(0.05)
    assert float(ck.restore()["x"].sum().compute()) == 100
    assert not [
        c
        for c in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))
        if c.startswith("veloc-")
    ]


def test_a_save_goes_on_when_its_client_leaves(client, tmp_path):
    with Client(client.cluster, set_as_default=False) as other:
        ck = vd.Checkpointer(other, "leaving", local=tmp_path / "l", remote=tmp_path / "r")
        x = other.persist(da.ones(50, chunks=1))
        ck.save({"x": x})
    again = vd.Checkpointer(client, "leaving", local=tmp_path / "l", remote=tmp_path / "r")
    deadline = time.monotonic() + 30
    while again.latest() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert float(again.restore()["x"].sum().compute()) == 50


def test_version_numbers(ck):
    assert ck.save({"s": 1}).version == 1
    assert ck.save({"s": 2}, version=5).version == 5
    handle = ck.save({"s": 3})
    assert handle.version == 6
    handle.wait("durable", timeout=30)
    for taken in (5, 6):
        with pytest.raises(vd.VersionExists, match="exists already"):
            ck.save({"s": 4}, version=taken)
    with pytest.raises(vd.VersionExists, match="only grow"):
        ck.save({"s": 4}, version=3)
    for bad in (-1, "7", 1.0, True, 10**9):
        with pytest.raises(vd.ConfigError, match="expected an int"):
            ck.save({"s": 4}, version=bad)


def test_keep_prunes_and_live_keys_keep_their_blocks(client, tmp_path):
    ck = vd.Checkpointer(client, "pruned", local=tmp_path / "l", remote=tmp_path / "r", keep=2)
    old = da.arange(8, chunks=2).persist()
    ck.save({"old": old}).wait("durable", timeout=30)
    for step in range(4):
        ck.save({"step": step, "x": da.full(4, step, chunks=2)}).wait("durable", timeout=30)
    ck.close()  # retention follows the commit
    again = vd.Checkpointer(client, "pruned", local=tmp_path / "l", remote=tmp_path / "r", keep=2)
    assert [v.version for v in again.versions()] == [4, 5]
    # `old` is live and has no newer snapshot: its blocks stay although its version is gone
    assert [e for e in os.listdir(tmp_path / "r" / "pruned") if e.startswith("v00000001-")]
    assert not [e for e in os.listdir(tmp_path / "r" / "pruned") if e.startswith("v00000002-")]
    del old
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and [
        e for e in os.listdir(tmp_path / "r" / "pruned") if e.startswith("v00000001-")
    ]:
        again.prune()
        time.sleep(0.1)
    assert not [e for e in os.listdir(tmp_path / "r" / "pruned") if e.startswith("v00000001-")]


def test_a_lazy_restored_graph_keeps_its_version(client, tmp_path):
    ck = vd.Checkpointer(client, "leased", local=tmp_path / "l", remote=tmp_path / "r", keep=1)
    ck.save({"x": da.arange(8, chunks=2)}).wait("durable", timeout=30)
    lazy = ck.restore()["x"] + 1
    for step in range(3):
        ck.save({"step": step}).wait("durable", timeout=30)
    ck.close()
    np.testing.assert_array_equal(lazy.compute(), np.arange(8) + 1)


def test_what_cannot_be_saved_is_named_at_the_call(ck, client):
    x = da.ones(4, chunks=2)
    with pytest.raises(vd.NotSupported, match=r"value\['s'\].*holds an Array of Dask inside another object"):
        ck.save({"s": Box([x])})
    with pytest.raises(vd.NotSupported, match=r"value\['lock'\].*cannot be pickled"):
        ck.save({"lock": threading.Lock()})
    with pytest.raises(vd.NotSupported, match="a dict key of type"):
        ck.save({b"key": 1})
    actor = client.submit(Actor, actor=True).result()
    with pytest.raises(vd.NotSupported, match="is an actor"):
        ck.save({"actor": actor})
    assert ck.latest() is None


class Actor:
    pass


class Box(list):
    """A container that is not a plain list."""


def test_pickle_only_where_it_is_allowed(client, tmp_path):
    ck = vd.Checkpointer(client, "strict", local=tmp_path / "l", remote=tmp_path / "r", allow_pickle=False)
    with pytest.raises(vd.NotSupported, match="allow_pickle"):
        ck.save({"object": {1, 2}})
    handle = ck.save({"objects": da.from_array(np.array([{1}, {2}], dtype=object), chunks=1)})
    with pytest.raises(vd.NotSupported, match="allow_pickle"):
        handle.wait("local", timeout=30)
    ck.save({"fine": da.ones(3), "text": "x", "bytes": b"y"}).wait("durable", timeout=30)
    assert float(ck.restore()["fine"].sum().compute()) == 3


def test_on_error_raise_brings_a_background_failure_to_the_next_call(client, tmp_path):
    ck = vd.Checkpointer(client, "raising", local=tmp_path / "l", remote=tmp_path / "r", on_error="raise")
    handle = ck.save({"bad": da.ones(2, chunks=1).map_blocks(boom, dtype=float)})
    with pytest.raises(vd.VelocError):
        handle.wait("local", timeout=30)
    with pytest.raises(vd.VelocError, match="no luck"):
        ck.save({"x": 1})
    ck.save({"x": 1}).wait("durable", timeout=30)
    ck.close()


def test_async_client(tmp_path):
    async def run():
        async with (
            LocalCluster(n_workers=1, processes=False, dashboard_address=":0", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            ck = await vd.Checkpointer(client, "async", local=tmp_path / "l", remote=tmp_path / "r")
            handle = await ck.save({"x": da.ones(10, chunks=2), "step": 3})
            await handle.wait("durable", timeout=30)
            state = await ck.restore()
            assert await client.compute(state["x"].sum()) == 10
            assert state["step"] == 3
            assert [v.version for v in await ck.versions()] == [1]
            assert (await ck.verify())["problems"] == []
            x = await ck.protect(da.ones(4, chunks=2))
            assert await ck.protected()
            del x
            await ck.close()

    asyncio.run(run())


def test_delayed_futures_and_scattered_data(ck, client):
    scattered = client.scatter([{"k": 1}])[0]
    handle = ck.save(
        {"d": dask.delayed(sum)([1, 2]), "f": client.submit(int, 7), "s": scattered, "none": client.submit(type(None))}
    )
    handle.wait("durable", timeout=30)
    state = ck.restore()
    assert state["d"].compute() == 3
    assert [state[k].result() for k in ("f", "s", "none")] == [7, {"k": 1}, None]


def test_a_burst_of_saves_leaves_no_more_than_keep(client, tmp_path):
    ck = vd.Checkpointer(client, "burst", local=tmp_path / "l", remote=tmp_path / "r", keep=2)
    x = da.ones(10, chunks=1).persist()
    handles = [ck.save({"x": x, "step": step}) for step in range(20)]
    for handle in handles:
        handle.wait("local", timeout=60)
    ck.close()
    again = vd.Checkpointer(client, "burst", local=tmp_path / "l", remote=tmp_path / "r", keep=2)
    assert [(v.version, v.level) for v in again.versions()] == [(19, "durable"), (20, "durable")]


def test_close_leaves_handles_with_what_became_of_them(client, tmp_path):
    ck = vd.Checkpointer(client, "closing", local=tmp_path / "l", remote=tmp_path / "r", on_error="raise")
    good = ck.save({"x": da.ones(20, chunks=1)})
    ck.close()
    assert (good.level, good.done) == ("durable", True)
    good.wait("durable", timeout=10)
    ck = vd.Checkpointer(client, "closing", local=tmp_path / "l", remote=tmp_path / "r", on_error="raise")
    bad = ck.save({"x": da.ones(2, chunks=1).map_blocks(boom, dtype=float)})
    with pytest.raises(vd.VelocError, match="no luck"):
        ck.close()
    assert "no luck" in str(bad.error)
    ck = vd.Checkpointer(client, "closing", local=tmp_path / "l", remote=tmp_path / "r")
    GATES[2] = threading.Event()
    late = ck.save({"f": client.submit(wait_for_gate, 2)})
    with pytest.warns(RuntimeWarning, match="it goes on in the cluster"):
        ck.close(timeout=0.1)
    GATES[2].set()
    late.wait("durable", timeout=30)
    with pytest.raises(vd.VelocError, match="is closed"):
        ck.save({"x": 1})


def test_an_iterative_program_keeps_no_more_versions_than_asked(client, tmp_path):
    """Each step depends on the last one, so Dask remembers the keys of all of them as lineage."""
    ck = vd.Checkpointer(client, "steps", local=tmp_path / "l", remote=tmp_path / "r", keep=2)
    u = da.ones(8, chunks=2)
    for _ in range(8):
        handle = ck.save({"u": u + 1})
        u = handle.value["u"]
        handle.wait("durable", timeout=30)
    ck.close()
    for place in (tmp_path / "r" / "steps", *tmp_path.glob("l/veloc-*/*/steps")):
        assert sorted(e[:9] for e in os.listdir(place) if e.startswith("v") and "." not in e) == [
            "v00000007",
            "v00000008",
        ]


def test_a_frame_that_dask_must_compute_to_know_its_divisions(client, tmp_path):
    import dask.dataframe as dd
    import pandas as pd

    df = dd.from_pandas(pd.DataFrame({"a": [3, 1, 2, 0] * 5, "b": range(20)}), npartitions=2)
    ck = vd.Checkpointer(client, "frames", local=tmp_path / "l", remote=tmp_path / "r")
    ck.save({"d": df.set_index("a"), "x": da.ones(4, chunks=2)}).wait("durable", timeout=60)
    assert len(ck.restore(persist=True)["d"]) == 20
    assert ck.protect(df.sort_values("b")).npartitions == 2


def test_a_relative_path_is_seen_from_the_client(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ck = vd.Checkpointer(client, "relative", local="l", remote="r")
    monkeypatch.chdir("/")
    ck.save({"s": 1}).wait("durable", timeout=30)
    assert (tmp_path / "r" / "relative" / "v00000001.json").exists()


@pytest.mark.parametrize("way", ["optimized", "delayed", "sliced"])
def test_a_graph_that_dask_has_taken_apart_keeps_its_version(client, tmp_path, way):
    ck = vd.Checkpointer(client, f"apart-{way}", local=tmp_path / "l", remote=tmp_path / "r", keep=1)
    ck.save({"x": da.arange(8, chunks=2)}).wait("durable", timeout=30)
    x = ck.restore()["x"]
    ways = {"optimized": dask.optimize(x + 1)[0], "delayed": x.to_delayed()[1], "sliced": x[2:]}
    kept = ways.pop(way)
    del ways
    del x
    gc.collect()
    for step in range(3):
        ck.save({"step": step}).wait("durable", timeout=30)
    ck.close()
    assert int(np.sum(client.compute(kept).result())) == {"optimized": 36, "delayed": 5, "sliced": 27}[way]
    del kept
    gc.collect()
    again = vd.Checkpointer(client, f"apart-{way}", local=tmp_path / "l", remote=tmp_path / "r", keep=1)
    deadline = time.monotonic() + 20
    while any(e.startswith("v00000001-") for e in os.listdir(tmp_path / "r" / again.name)):
        assert time.monotonic() < deadline
        again.save({"more": 1}).wait("durable", timeout=30)
