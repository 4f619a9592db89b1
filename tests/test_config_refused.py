"""Bad configuration is named when the Checkpointer is made, nothing is written, and secrets go nowhere."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
import stat

import dask.array as da
import pytest
from distributed import Client, LocalCluster

import veloc_dask as vd
from veloc_dask.storage.tiers import is_ram

CANARY = "canary-7c1d0e"


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", memory_limit="1GiB"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "-x", "x y", "x\0", "é", "x" * 129, None, 3])
def test_names(client, tmp_path, name):
    with pytest.raises(vd.ConfigError, match="checkpoint name"):
        vd.Checkpointer(client, name, local=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither local= nor remote="),
        ({"remote": ""}, "remote ''"),
        ({"local": ""}, "expected the path of a directory"),
        ({"local": [vd.Tier("x", capacity="many")]}, "expected bytes or a text"),
        ({"local": [vd.Tier("x", capacity=0)]}, "more than 0 bytes"),
        ({"local": ["x", "x"]}, "given twice"),
        ({"local": "x", "keep": 0}, "keep 0"),
        ({"local": "x", "on_error": "ignore"}, "on_error 'ignore'"),
        ({"remote": "s3://bucket/x"}, "single_writer=True"),
        ({"remote": "https://user:" + CANARY + "@host/x"}, "remote https://host/x"),
        ({"remote": "nosuchscheme://x", "single_writer": True}, "nosuchscheme"),
        ({"local": "x", "storage_options": {"o": object()}}, "storage_options"),
    ],
    ids=str,
)
def test_options(client, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vd.ConfigError, match=message) as found:
        vd.Checkpointer(client, "options", **options)
    assert CANARY not in str(found.value)
    assert not list(tmp_path.iterdir())


def test_a_client_is_needed(tmp_path):
    with pytest.raises(vd.ConfigError, match=r"expected a distributed\.Client"):
        vd.Checkpointer("tcp://here:1", "x", local=tmp_path)


def test_a_variable_that_the_workers_do_not_have(client):
    with pytest.raises(vd.ConfigError, match="this variable is not set"):
        vd.Checkpointer(client, "variable", local="$NO_SUCH_VARIABLE_HERE/x")


def test_a_tier_that_others_may_write_to(client, tmp_path):
    ours = tmp_path / f"veloc-{os.geteuid()}"
    ours.mkdir()
    ours.chmod(0o777)
    with pytest.raises(vd.ConfigError, match="group or others may write"):
        vd.Checkpointer(client, "writable", local=tmp_path)


def test_a_tier_in_dasks_own_directory(client):
    directory = client.run(lambda dask_worker: dask_worker.local_directory)
    with pytest.raises(vd.ConfigError, match="which Dask deletes"):
        vd.Checkpointer(client, "inside", local=os.path.join(next(iter(directory.values())), "tier"))


@pytest.mark.skipif(not is_ram("/dev/shm"), reason="needs a file system in RAM at /dev/shm")
def test_a_tier_in_ram_that_cannot_fit_is_refused_with_the_arithmetic(client, tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="veloc-test-") as tier:
        with pytest.raises(
            vd.ConfigError, match=r"do not fit: the node has [\d,]+ bytes, its workers may use 0.8 of 2,147,483,648"
        ):
            vd.Checkpointer(client, "ram", local=vd.Tier(tier, capacity="900 TiB"))
        vd.Checkpointer(client, "ram", local=vd.Tier(tier, capacity="64 MiB"))


def test_the_same_name_with_other_settings(client, tmp_path):
    vd.Checkpointer(client, "same", local=tmp_path / "l")
    vd.Checkpointer(client, "same", local=tmp_path / "l")
    with pytest.raises(vd.ConfigError, match="open in this cluster with other settings"):
        vd.Checkpointer(client, "same", local=tmp_path / "l", keep=5)


def test_memory_is_refused_with_worker_processes(tmp_path):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit="1GiB") as cluster,
        Client(cluster) as client,
        pytest.raises(vd.ConfigError, match="memory:// is one store per process"),
    ):
        vd.Checkpointer(client, "memory", local=tmp_path, remote="memory://x")


def test_files_and_directories_are_private_whatever_the_umask(client, tmp_path):
    before = os.umask(0)
    try:
        ck = vd.Checkpointer(client, "private", local=tmp_path / "l", remote=tmp_path / "r")
        ck.save({"x": da.ones(4, chunks=2), "o": {1}}).wait("durable", timeout=30)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_secrets_reach_neither_files_nor_logs_nor_texts(client, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    ck = vd.Checkpointer(
        client,
        "canary",
        local=tmp_path / "l",
        remote="memory://canary/x",
        storage_options={"secret": CANARY},
    )
    handle = ck.save({"x": da.ones(4, chunks=2)})
    handle.wait("durable", timeout=30)
    plugins = client.run_on_scheduler(lambda dask_scheduler: pickle.dumps(list(dask_scheduler.worker_plugins.values())))
    texts = [repr(ck), repr(handle), repr(ck.versions()), repr(ck.restore()["x"].dask), caplog.text, repr(ck._config)]
    assert CANARY not in "".join(texts)
    assert CANARY.encode() not in plugins
    assert CANARY.encode() not in pickle.dumps(vd.VelocPlugin())
    assert CANARY.encode() not in b"".join(p.read_bytes() for p in pathlib.Path(tmp_path).rglob("*") if p.is_file())
    import fsspec

    assert CANARY.encode() not in b"".join(bytes(f.getvalue()) for f in fsspec.filesystem("memory").store.values())
