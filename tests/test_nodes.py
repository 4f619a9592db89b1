"""Several nodes: worker processes whose tiers are different directories, told apart by an environment variable.

A node here is a directory of tiers, which is what makes a node for us: its uuid lies on it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, futures_of, wait

import veloc_dask as vd
from veloc_dask import restoring
from veloc_dask.scheduler_plugin import load_block, messages
from veloc_dask.scheduler_plugin.worker import VelocWorker
from veloc_dask.storage import root as roots
from veloc_dask.storage.reader import BlockRef


class Nodes:
    """A scheduler and worker processes on nodes that are directories below one path."""

    def __init__(self, path):
        self.path = path
        self.cluster = LocalCluster(n_workers=0, dashboard_address=":0")
        self.client = Client(self.cluster)
        self.processes = {}

    def start(self, *names):
        for name in names:
            tiers = self.path / "nodes" / name
            tiers.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "distributed.cli.dask_worker", self.cluster.scheduler_address]
            command += ["--no-nanny", "--nthreads", "1", "--name", name, "--memory-limit", "1GiB", "--no-dashboard"]
            command += ["--local-directory", str(self.path / "scratch")]
            log = open(self.path / f"{name}.log", "w")  # noqa: SIM115 - closed with the process
            environment = {**os.environ, "NODE_TIERS": str(tiers), "DASK_DISTRIBUTED__WORKER__VALIDATE": "True"}
            self.processes[name] = (subprocess.Popen(command, stdout=log, stderr=log, env=environment), log)
        self.client.wait_for_workers(len(self.processes), timeout=60)

    def kill(self, name, wipe=False):
        process, log = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        log.close()
        if wipe:
            shutil.rmtree(self.path / "nodes" / name)
        deadline = time.monotonic() + 30
        while name in [w["name"] for w in self.client.scheduler_info(n_workers=-1)["workers"].values()]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def checkpointer(self, name, remote=True, **options):
        where = self.path / "remote" if remote else None
        return vd.Checkpointer(self.client, name, local="$NODE_TIERS", remote=where, **options)

    def address(self, name):
        return next(a for a, w in self.client.scheduler_info(n_workers=-1)["workers"].items() if w["name"] == name)

    def stop(self):
        for process, log in self.processes.values():
            process.kill()
            process.wait()
            log.close()
        self.processes.clear()
        self.client.close()
        self.cluster.close()


@pytest.fixture
def nodes(tmp_path):
    bed = Nodes(tmp_path)
    yield bed
    bed.stop()


def spread(client, n=12):
    """An array whose blocks lie on all workers."""
    x = da.from_array(np.arange(n * 4.0), chunks=4)
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])
    blocks = [
        client.submit(np.arange, i * 4.0, i * 4.0 + 4, workers=[at], allow_other_workers=True, pure=False)
        for i, at in zip(range(n), itertools.cycle(addresses), strict=False)
    ]
    wait(blocks)
    name = "spread"
    graph = {(name, i): future for i, future in enumerate(blocks)}
    return da.Array(graph, name, x.chunks, dtype=float), np.arange(n * 4.0)


def test_each_node_holds_its_part_and_all_together_restore(nodes):
    nodes.start("a", "b")
    x, expected = spread(nodes.client)
    ck = nodes.checkpointer("parts", remote=False)
    ck.save({"x": x}).wait("local", timeout=60)
    held = {n: len(list((nodes.path / "nodes" / n).rglob("x/c/*"))) for n in ("a", "b")}
    assert held == {"a": 6, "b": 6}
    restored = ck.restore()["x"].persist()
    wait(restored)
    # each block was loaded where its copy lies
    where = nodes.client.who_has(futures_of(restored))
    for key, holders in where.items():
        refs = next(t for k, t in dict(ck.restore()["x"].__dask_graph__()).items() if k[1:] == key[1:]).args[0]
        node = messages.decode(refs[0], BlockRef).nodes[0]
        marker = next((nodes.path / "nodes" / ("a" if holders[0] == nodes.address("a") else "b")).rglob("node.json"))
        assert node in marker.read_text()
    np.testing.assert_array_equal(restored.compute(), expected)


def test_a_version_whose_node_is_missing_is_incomplete_until_the_node_joins(nodes):
    nodes.start("a", "b")
    x, expected = spread(nodes.client)
    nodes.checkpointer("missing", remote=False).save({"x": x}).wait("local", timeout=60)
    del x
    nodes.kill("b")
    ck = nodes.checkpointer("missing", remote=False)
    assert [v.level for v in ck.versions()] == ["incomplete"]
    with pytest.raises(vd.CheckpointNotFound, match=r"version 1 is incomplete: 1 of 2 table segments are on no node"):
        ck.restore()
    with pytest.raises(vd.ConfigError, match=r"expected 2 node\(s\) within 0.3 s, found 1"):
        ck.restore(wait_for=2, timeout=0.3)
    nodes.start("b")
    np.testing.assert_array_equal(ck.restore(wait_for=2)["x"].compute(), expected)


def test_a_worker_without_a_copy_reads_from_its_peer(nodes):
    nodes.start("a", "b")
    ck = nodes.checkpointer("peers", remote=False)
    value = nodes.client.submit(np.arange, 1000, workers=["a"])
    ck.save({"v": value}).wait("local", timeout=60)
    catalog = nodes.client.sync(
        ck._ask, "veloc_restore", name="peers", version=None, client="test", wait_for=0, timeout_s=1.0
    )
    root = roots.decode(catalog["root"], where="test")
    refs = restoring.block_refs(root, catalog["segments"], what="test")[0]
    there = nodes.client.submit(load_block, refs, workers=["b"], pure=False).result()
    np.testing.assert_array_equal(there, np.arange(1000))


def test_a_lost_node_is_recovered_from_the_remote_tier(nodes):
    nodes.start("a", "b")
    x, expected = spread(nodes.client)
    scattered = nodes.client.scatter([np.arange(7)], workers=["b"])[0]
    ck = nodes.checkpointer("lost")
    h = ck.save({"x": x, "s": scattered})
    h.wait("durable", timeout=60)
    nodes.kill("b", wipe=True)
    np.testing.assert_array_equal(x.compute(), expected)
    np.testing.assert_array_equal(scattered.result(), np.arange(7))
    stats = nodes.client.sync(nodes.client.scheduler.veloc_stats)
    assert stats["loaded"] == 6
    assert stats["failures"] == 0


def test_a_node_that_is_lost_before_the_flush_has_its_blocks_captured_again(nodes, monkeypatch):
    monkeypatch.setattr("veloc_dask.scheduler_plugin.nodes.NODE_GRACE_S", 1.0)
    nodes.start("a", "b")
    x, expected = spread(nodes.client)
    ck = nodes.checkpointer("unflushed")
    remote = nodes.path / "remote"
    hold = nodes.client.run(stall_flush, "unflushed")
    assert all(hold.values())
    h = ck.save({"x": x})
    h.wait("local", timeout=60)
    nodes.kill("b", wipe=True)
    np.testing.assert_array_equal(x.compute(), expected)  # lineage: the snapshots went with the node
    nodes.client.run(release_flush)
    h.wait("durable", timeout=60)
    np.testing.assert_array_equal(ck.restore()["x"].compute(), expected)
    assert len(list(remote.rglob("x/c/*"))) == 12


def stall_flush(name, dask_worker):
    """Make the flush threads of a worker wait, as a remote tier that does not answer would."""
    import threading

    gate = dask_worker.veloc_gate = threading.Event()
    space = dask_worker.plugins[VelocWorker.name].spaces[name]
    put_many = space.remote.put_many

    def waiting(objects):
        gate.wait(60)
        return put_many(objects)

    space.remote.put_many = waiting
    return True


def release_flush(dask_worker):
    dask_worker.veloc_gate.set()
