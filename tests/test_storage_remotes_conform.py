"""Every remote tier keeps the same promises: one suite for all of them."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from veloc_dask.storage.errors import ConfigError, IntegrityError
from veloc_dask.storage.remote import FsspecRemote, PosixRemote, Remote, check_url, open_remote, posix_path, sanitized
from veloc_dask.testing.remotes import NoDirectories

KINDS = ["path", "file URL", "memory", "local file system of fsspec", "object store"]


@pytest.fixture(params=KINDS)
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    root = tmp_path / "not" / "yet" / "there"
    if request.param == "path":
        yield open_remote(str(root))
    elif request.param == "file URL":
        yield open_remote(f"file://{root}")
    elif request.param == "object store":
        yield NoDirectories(open_remote(str(root)))
    elif request.param == "memory":
        store = open_remote(f"memory://test-{uuid.uuid4().hex}/deep")
        yield store
        store.remove_tree("")
    else:
        fsspec_remote = FsspecRemote(f"file://{root}", {})
        fsspec_remote.open()
        yield fsspec_remote


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_was_put_comes_back(remote: Remote) -> None:
    buffers = [b"ab", bytearray(b"cd"), memoryview(b"ef"), np.arange(2, dtype="<u2"), np.zeros((2, 2), "u1"), b""]
    expected = b"abcdef\0\0\1\0\0\0\0\0"
    assert remote.put("n/d/u/object", buffers) == len(expected)
    data = remote.get("n/d/u/object")
    assert data.tobytes() == expected
    assert data.dtype == np.uint8
    data[0] = 0  # it is ours to change
    assert remote.get("n/d/u/object").tobytes() == expected
    assert remote.size("n/d/u/object") == len(expected)


def test_buffers_may_come_from_a_generator(remote: Remote) -> None:
    assert remote.put("n/object", (b"%d" % n for n in range(10))) == 10
    assert remote.get("n/object").tobytes() == b"0123456789"


def test_put_replaces(remote: Remote) -> None:
    remote.put("n/object", [b"a longer one"])
    remote.put("n/object", [b"short"])
    assert remote.get("n/object").tobytes() == b"short"
    remote.put("n/object", [])
    assert remote.get("n/object").tobytes() == b""
    assert remote.size("n/object") == 0


def test_put_many(remote: Remote) -> None:
    objects = [(f"n/{n % 3}/{n}", [b"x" * n]) for n in range(10)]
    assert remote.put_many(objects) == list(range(10))
    for path, buffers in objects:
        assert remote.get(path).tobytes() == buffers[0]
    assert remote.put_many([]) == []


def test_a_put_that_fails_leaves_nothing(remote: Remote) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the other half is lost")

    with pytest.raises(RuntimeError, match="other half"):
        remote.put("n/object", broken())
    assert remote.size("n/object") is None
    assert remote.names("n") == []


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (3, 4, b"3456"),
        (0, 0, b""),
        (8, 5, b"89"),
        (10, None, b""),
        (10, 5, b""),
        (11, 5, b""),
        (2**62, 2**62, b""),
    ],
)
def test_ranges(remote: Remote, offset: int, length: int | None, expected: bytes) -> None:
    remote.put("n/object", [b"0123456789"])
    assert remote.get("n/object", offset=offset, length=length).tobytes() == expected


def test_limits(remote: Remote) -> None:
    remote.put("n/object", [b"0123456789"])
    assert remote.get("n/object", limit=10).size == 10
    assert remote.get("n/object", length=3, limit=3).size == 3
    with pytest.raises(IntegrityError, match="expected at most 9 bytes, found 10"):
        remote.get("n/object", limit=9)


def test_what_is_missing(remote: Remote) -> None:
    for path in ("object", "n/object", "n/d/u/object"):
        with pytest.raises(FileNotFoundError):
            remote.get(path)
        with pytest.raises(FileNotFoundError):
            remote.get(path, offset=1, length=2, limit=3)
        assert remote.size(path) is None
        assert remote.names(path) == []
        remote.remove(path)
        remote.remove_tree(path)
        remote.sweep(path)
    remote.put("n/object", [b"x"])
    with pytest.raises(FileNotFoundError):
        remote.get("n/object/below")
    assert remote.size("n/object/below") is None
    assert remote.size("n") is None


def test_names(remote: Remote) -> None:
    for path in ("n/b", "n/a", "n/d/x", "n/d/y/z", "m/c"):
        remote.put(path, [b"x"])
    assert remote.names("n") == ["a", "b", "d"]
    assert remote.names("n/d") == ["x", "y"]
    assert remote.names("n/d/y") == ["z"]
    remote.remove("n/a")
    assert remote.names("n") == ["b", "d"]
    remote.create("n/e", b"x")
    assert remote.names("n") == ["b", "d", "e"]


def test_remove(remote: Remote) -> None:
    remote.put("n/object", [b"x"])
    remote.put("n/other", [b"y"])
    remote.remove("n/object")
    assert remote.size("n/object") is None
    assert remote.get("n/other").tobytes() == b"y"
    remote.remove("n/object")


def test_remove_tree(remote: Remote) -> None:
    for path in ("n/d/x", "n/d/y/z", "n/dd/x", "n/e"):
        remote.put(path, [b"x"])
    remote.remove_tree("n/d")
    assert remote.names("n") == ["dd", "e"]
    assert remote.names("n/d") == []
    with pytest.raises(FileNotFoundError):
        remote.get("n/d/y/z")
    remote.put("n/d/x", [b"again"])  # the directories are made again
    assert remote.get("n/d/x").tobytes() == b"again"
    remote.sweep("n")
    assert remote.names("n") == ["d", "dd", "e"]


def test_create_is_exclusive(remote: Remote) -> None:
    assert remote.create("n/root", b"first")
    assert not remote.create("n/root", b"second")
    assert remote.get("n/root").tobytes() == b"first"
    remote.remove("n/root")
    assert remote.create("n/root", b"third")
    remote.put("n/d/x", [b"x"])
    assert remote.create("n/inside", b"x", within="n/d")
    assert not remote.create("n/inside", b"y", within="n/d")
    assert remote.names("n/d") == ["x"]


def test_of_many_threads_one_creates(remote: Remote) -> None:
    for number in range(10):
        won: list[int] = []
        gate = threading.Barrier(6)

        def create(
            writer: int, path: str = f"n/{number}", won: list[int] = won, gate: threading.Barrier = gate
        ) -> None:
            gate.wait()
            if remote.create(path, b"%d" % writer):
                won.append(writer)

        threads = [threading.Thread(target=create, args=(w,)) for w in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = won
        assert remote.get(f"n/{number}").tobytes() == b"%d" % winner


@pytest.mark.usefixtures("hasty_threads")
def test_threads_that_write_while_others_remove(remote: Remote) -> None:
    """Retention and flushes share one remote tier; neither may trip over the other."""
    errors: list[BaseException] = []
    done = threading.Event()

    def work(number: int) -> None:
        try:
            for n in range(60):
                remote.put(f"n/keep{number}/{n}/x", [b"x"])
        except BaseException as error:  # noqa: BLE001  # the test raises it
            errors.append(error)

    def remove() -> None:
        try:
            while not done.is_set():
                remote.put("n/gone/x", [b"x"])
                remote.remove_tree("n/gone")
        except BaseException as error:  # noqa: BLE001  # the test raises it
            errors.append(error)

    remover = threading.Thread(target=remove)
    writers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in (remover, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    remover.join()
    assert errors == []
    for number in range(3):
        assert len(remote.names(f"n/keep{number}")) == 60


# -- opening --------------------------------------------------------------------------------------------------------------


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="give a directory"):
        open_remote(str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="nosuchprotocol"):
        open_remote("nosuchprotocol://bucket/x")


def test_opening_leaves_nothing(tmp_path: Path) -> None:
    open_remote(str(tmp_path / "remote"))
    assert list((tmp_path / "remote").iterdir()) == []


def test_opening_removes_what_killed_processes_have_left(tmp_path: Path) -> None:
    for age, entry in ((7200, ".veloc-probe-old"), (7200, ".tmp-old"), (0, ".veloc-probe-new"), (7200, "somebody's")):
        (tmp_path / entry).write_bytes(b"")
        os.utime(tmp_path / entry, (time.time() - age, time.time() - age))
    open_remote(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".veloc-probe-new", "somebody's"]


def test_a_file_system_that_replaces_where_it_must_refuse_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.link", lambda source, target: Path(source).rename(target))
    with pytest.raises(ConfigError, match=r"link\(2\) must refuse"):
        PosixRemote(str(tmp_path)).open()
    assert list(tmp_path.iterdir()) == []


def test_credentials_are_in_no_message() -> None:
    assert sanitized("s3://user:secret@bucket/x?token=secret#secret") == "s3://bucket/x"
    with pytest.raises(ConfigError) as caught:
        check_url("s3://user:secret@bucket/x?token=secret", single_writer=False)
    assert "secret" not in str(caught.value)
    check_url("s3://bucket/x", single_writer=True)
    check_url("memory://x", single_writer=False)
    check_url("/x", single_writer=False)


def test_paths_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "/scratch/me")
    assert posix_path("file:///a/b") == "/a/b"
    assert posix_path("$SOMEWHERE/run") == "/scratch/me/run"
    assert posix_path("s3://bucket/x") is None
    assert posix_path("memory://x") is None
