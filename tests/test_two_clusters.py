"""Two clusters under one name: one version number is committed once, nothing is mixed, and a run that was overtaken stays out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import dask.array as da
import pytest
from distributed import Client, LocalCluster

import veloc_dask as vd


def cluster(n_workers=1, **options):
    return LocalCluster(
        n_workers=n_workers, threads_per_worker=1, dashboard_address=":0", memory_limit="2GiB", **options
    )


@pytest.fixture
def two_clients():
    with (
        cluster(processes=False) as one,
        cluster(processes=False) as two,
        Client(one, set_as_default=False) as first,
        Client(two, set_as_default=False) as second,
    ):
        yield first, second


def save_together(first, second, where, rounds):
    for n in range(rounds):
        checkpointers = [vd.Checkpointer(c, f"race-{n}", **where) for c in (first, second)]
        values = [c.persist(da.full(20, i, chunks=1)) for i, c in enumerate((first, second))]
        handles = [ck.save({"x": x}, version=5) for ck, x in zip(checkpointers, values, strict=True)]
        outcomes = []
        for handle in handles:
            try:
                handle.wait("durable" if "remote" in where else "local", timeout=60)
                outcomes.append(None)
            except vd.VersionExists as error:
                outcomes.append(error)
        yield checkpointers, outcomes


def test_one_version_number_is_committed_once_and_nothing_is_mixed(two_clients, tmp_path):
    first, second = two_clients
    where = {"local": tmp_path / "local", "remote": tmp_path / "remote"}
    for checkpointers, outcomes in save_together(first, second, where, rounds=5):
        assert sorted(o is None for o in outcomes) == [False, True], outcomes
        winner = outcomes.index(None)
        for client, ck in zip((first, second), checkpointers, strict=True):
            x = ck.restore(5)["x"]
            assert set(client.compute(x).result()) == {winner}
        loser = checkpointers[1 - winner]
        # the loser's attempt goes from both tiers
        attempts = set()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            attempts = {
                d for r in (tmp_path / "remote", *tmp_path.glob("local/veloc-*/*")) for d in _attempts(r / loser.name)
            }
            if len(attempts) == 1:
                break
            time.sleep(0.05)
        assert len(attempts) == 1


def _attempts(path):
    return [e for e in os.listdir(path) if e.startswith("v") and "." not in e] if path.is_dir() else []


def test_without_a_remote_tier_the_node_decides(two_clients, tmp_path):
    first, second = two_clients
    for checkpointers, outcomes in save_together(first, second, {"local": tmp_path / "local"}, rounds=3):
        assert sorted(o is None for o in outcomes) == [False, True], outcomes
        winner = outcomes.index(None)
        x = checkpointers[winner].restore(5)["x"]
        assert set((first, second)[winner].compute(x).result()) == {winner}


def test_automatic_numbers_go_on_where_the_other_cluster_stopped(two_clients, tmp_path):
    first, second = two_clients
    where = {"local": tmp_path / "local", "remote": tmp_path / "remote"}
    vd.Checkpointer(first, "series", **where).save({"s": 1}).wait("durable", timeout=30)
    ck = vd.Checkpointer(second, "series", **where)
    handle = ck.save({"s": 2})
    assert handle.version == 2
    handle.wait("durable", timeout=30)
    assert [v.version for v in ck.versions()] == [1, 2]


def test_a_reader_does_not_take_the_name_from_a_running_cluster(two_clients, tmp_path):
    first, second = two_clients
    where = {"local": tmp_path / "local", "remote": tmp_path / "remote"}
    ck = vd.Checkpointer(first, "read", **where)
    ck.save({"s": 1}).wait("durable", timeout=30)
    reader = vd.Checkpointer(second, "read", **where)
    assert reader.restore() == {"s": 1}
    reader.prune()
    ck.save({"s": 2}).wait("durable", timeout=30)
    assert reader.latest() == 2


OVERTAKEN = """
    import sys
    import dask.array as da
    from distributed import Client
    import veloc_dask as vd

    if __name__ == "__main__":
        with Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as c:
            ck = vd.Checkpointer(c, "overtaken", local=sys.argv[1], remote=sys.argv[2])
            ck.save({"x": da.zeros(4, chunks=1)}).wait("durable", timeout=60)
            print("saved", flush=True)
            sys.stdin.readline()
            handle = ck.save({"x": da.zeros(4, chunks=1)}, version=9)
            try:
                handle.wait("durable", timeout=60)
                print("durable", flush=True)
            except vd.VersionExists as error:
                print("VersionExists", error, flush=True)
"""


def test_a_run_that_was_stopped_and_overtaken_may_not_commit(two_clients, tmp_path):
    client, _ = two_clients
    script = tmp_path / "overtaken.py"
    script.write_text(textwrap.dedent(OVERTAKEN))
    arguments = [sys.executable, str(script), str(tmp_path / "local"), str(tmp_path / "remote")]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "saved"
        os.kill(process.pid, signal.SIGSTOP)
        ck = vd.Checkpointer(client, "overtaken", local=tmp_path / "local", remote=tmp_path / "remote")
        assert float(client.compute(ck.restore()["x"].sum()).result()) == 0
        x = client.persist(da.ones(4, chunks=1))
        ck.save({"x": x}).wait("durable", timeout=30)
        os.kill(process.pid, signal.SIGCONT)
        out, _ = process.communicate("go on\n", timeout=90)
        assert out.startswith("VersionExists"), out
        assert "run 2 has taken over this name" in out
        deadline = time.monotonic() + 20
        while ck.latest() != 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert float(client.compute(ck.restore()["x"].sum()).result()) == 4
    finally:
        process.kill()
        process.communicate()
