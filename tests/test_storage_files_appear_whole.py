"""A file appears under its name complete or not at all, is ours alone, and a link never leads elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from veloc_dask.storage import files, reader
from veloc_dask.storage.errors import BlockLost, IntegrityError, TierError
from veloc_dask.storage.remote import PosixRemote
from veloc_dask.storage.tiers import Node, TierConfig, open_node
from veloc_dask.testing import faults, versions
from veloc_dask.testing.processes import Child
from veloc_dask.testing.syscalls import FailingCalls

OLD, NEW = b"old" * 100, b"new!" * 200
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ESTALE)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def write(path: Path, data: bytes = NEW, *, exclusive: bool = False) -> int:
    return files.write(str(path), [data[:5], data[5:]], sync=True, exclusive=exclusive)


def temporary(directory: Path) -> list[str]:
    return [e for e in os.listdir(directory) if files.is_temporary(e)]


# -- killed at any moment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replace", "exclusive"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("point", ["opened", "written", "before_rename", "after_rename", "synced"])
def test_a_killed_writer_leaves_the_old_or_the_new_file(
    tmp_path: Path, point: str, replace: bool, exclusive: bool
) -> None:
    path = tmp_path / "object"
    if replace:
        path.write_bytes(OLD)
    with faults.arm(f"file.{point}", faults.kill), Child(lambda: write(path, exclusive=exclusive)) as child:
        assert child.exit_code() == -signal.SIGKILL
    renamed = point in ("after_rename", "synced")
    if renamed:
        assert path.read_bytes() == NEW
    elif replace:
        assert path.read_bytes() == OLD
    else:
        assert not path.exists()
    assert bool(temporary(tmp_path)) is not renamed
    assert files.remove_temporary(str(tmp_path)) >= 0
    assert not temporary(tmp_path)


def test_temporary_files_of_living_and_unknown_processes_stay(tmp_path: Path) -> None:
    foreign = tmp_path / ".tmp-1-1-1-0123"  # another namespace: nobody here can tell
    odd = tmp_path / ".tmp-what"
    for path in (foreign, odd):
        path.write_bytes(b"x")
    with faults.arm("file.written", faults.stop), Child(write, tmp_path / "object") as child:
        child.wait_until_stopped()
        assert files.remove_temporary(str(tmp_path)) == 0
        assert len(temporary(tmp_path)) == 3
        child.resume()
        assert child.result() == len(NEW)
    assert (tmp_path / "object").read_bytes() == NEW


@pytest.mark.parametrize("nbytes", [0, 1, 40, 67, 68])
def test_a_file_that_lost_its_end_is_found(tmp_path: Path, nbytes: int) -> None:
    """P05: the disk was lying when it said that the file is complete."""
    remote = PosixRemote(str(tmp_path))
    remote.open()
    saved = [np.arange(8)]
    with faults.arm("file.before_rename", faults.on_path("/u/c/0", faults.torn(nbytes))):
        root = versions.save(Node("", ()), remote, "n", 1, 1, saved=saved)
    if nbytes == 68:  # nothing was lost: 8 numbers and a checksum
        np.testing.assert_array_equal(versions.read(remote, root)[0], saved[0])
    else:
        with pytest.raises(BlockLost, match="no readable copy"):
            versions.read(remote, root)


# -- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("error", ERRORS, ids=[errno.errorcode[e] for e in ERRORS])
def test_a_failing_call_leaves_no_temporary_file(tmp_path: Path, error: int, for_ever: bool) -> None:
    for exclusive in (False, True):
        for number in range(1, 30):
            directory = tmp_path / f"{exclusive}-{number}"
            directory.mkdir()
            path = directory / "object"
            with FailingCalls(str(directory), number=number, error=error, for_ever=for_ever) as calls:
                try:
                    write(path, exclusive=exclusive)
                except OSError as found:
                    if found.errno != error:
                        raise
            if not calls.failed:
                break
            if path.exists():
                assert path.read_bytes() == NEW
            # the removal of the temporary file may itself be the call that fails; then it is swept
            if calls.seen[number - 1][0] != "unlink":
                assert not temporary(directory)
        assert number > 5, "too few calls were seen"


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, memoryview(data)[: max(1, len(data) // 2)]))
    write(tmp_path / "object")
    assert (tmp_path / "object").read_bytes() == NEW


def test_a_file_shorter_than_what_was_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write

    def lying(fd: int, data: memoryview) -> int:
        return original(fd, data[:-1]) + 1

    monkeypatch.setattr(os, "write", lying)
    with pytest.raises(OSError, match="the file has"):
        write(tmp_path / "object")
    assert not os.listdir(tmp_path)


def test_a_failed_fsync_is_never_tried_again_on_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P09: the kernel may have dropped the pages, and call the second fsync a success."""
    original = os.fsync
    synced: list[str] = []

    def fsync(fd: int) -> None:
        target = os.readlink(f"/proc/self/fd/{fd}")
        synced.append(target)
        if len([t for t in synced if files.is_temporary(os.path.basename(t))]) <= 3 and os.path.isfile(target):
            raise OSError(errno.EIO, "fsync failed", target)
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    remote = PosixRemote(str(tmp_path))
    for _ in range(3):
        with pytest.raises(OSError, match="fsync failed"):
            remote.put("n/object", [NEW])
        assert os.listdir(tmp_path / "n") == []
    remote.put("n/object", [NEW])
    tried = [t for t in synced if files.is_temporary(os.path.basename(t))]
    assert len(tried) == len(set(tried)) == 4
    assert (tmp_path / "n" / "object").read_bytes() == NEW


def test_a_durable_object_has_durable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another process has made them: it may have been killed before it synced them."""
    (tmp_path / "n" / "d").mkdir(parents=True, mode=0o700)
    original = os.fsync
    synced: set[str] = set()

    def fsync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    PosixRemote(str(tmp_path)).put("n/d/u/object", [NEW])
    directories = {t for t in synced if os.path.isdir(t)}
    assert directories == {str(tmp_path), *(str(tmp_path / p) for p in ("n", "n/d", "n/d/u"))}


# -- exclusive ------------------------------------------------------------------------------------------------------------


def later(call: Callable[[str, str], None]) -> Callable[[str, str], None]:
    def slow(source: str, target: str) -> None:
        time.sleep(0.003)
        call(source, target)

    return slow


def test_of_many_creators_exactly_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = PosixRemote(str(tmp_path))
    nobjects, nwriters = 25, 4
    # without this, a look before the leap would hardly ever be caught
    for name in ("rename", "link"):
        monkeypatch.setattr(os, name, later(getattr(os, name)))

    def create(writer: int) -> list[int]:
        go = tmp_path / "go"
        while not go.exists():
            pass
        return [n for n in range(nobjects) if remote.create(f"n/{n}", b"%d" % writer * 500)]

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(create, w)) for w in range(nwriters)]
        (tmp_path / "go").touch()
        won = [child.result() for child in children]
    assert sorted(n for numbers in won for n in numbers) == list(range(nobjects))
    for writer, numbers in enumerate(won):
        for n in numbers:
            assert remote.get(f"n/{n}").tobytes() == b"%d" % writer * 500
    assert not temporary(tmp_path / "n")


def test_a_lost_reply_of_link_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client sends the call again and is told that the name exists: made by its own first call."""
    original = os.link

    def link(source: str, target: str) -> None:
        original(source, target)
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    assert write(tmp_path / "object", exclusive=True) == len(NEW)
    assert os.listdir(tmp_path) == ["object"]
    with pytest.raises(FileExistsError):
        write(tmp_path / "object", OLD, exclusive=True)
    assert (tmp_path / "object").read_bytes() == NEW


def test_an_object_does_not_appear_out_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    remote = PosixRemote(str(tmp_path))
    remote.put("n/attempt/object", [b"x"])
    removal = faults.arm("file.before_rename", lambda **_: remote.remove_tree("n/attempt"))
    with removal, pytest.raises(FileNotFoundError):
        remote.create("n/root", NEW, within="n/attempt")
    with pytest.raises(FileNotFoundError):
        remote.create("n/root", NEW, within="n/attempt")
    assert os.listdir(tmp_path / "n") == []


# -- ours alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        remote = PosixRemote(str(tmp_path / "remote"))
        remote.open()
        remote.put("n/d/object", [NEW])
        remote.create("n/root", NEW)
        node = open_node([TierConfig(str(tmp_path / "tier"))])
        node.put("n/d/object", NEW)
        node.close()
    for directory, directories, entries in os.walk(tmp_path):
        for entry in directories:
            assert stat.S_IMODE(os.stat(os.path.join(directory, entry)).st_mode) == 0o700, entry
        for entry in entries:
            assert stat.S_IMODE(os.stat(os.path.join(directory, entry)).st_mode) == 0o600, entry


def test_a_directory_whose_maker_was_killed_early_gets_its_mode(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "n", 0)
    files.make_private_dirs(str(tmp_path), "n")
    assert stat.S_IMODE(os.stat(tmp_path / "n").st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o777])
def test_directories_that_others_can_write_are_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "n").mkdir()
    os.chmod(tmp_path / "n", mode)
    with pytest.raises(TierError, match="chmod 0700"):
        PosixRemote(str(tmp_path)).put("n/object", [NEW])
    assert not os.listdir(tmp_path / "n")


@as_root
def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir(mode=0o700)
    os.chown(tmp_path / "n", 65534, 65534)
    with pytest.raises(TierError, match="expected an owner with uid 0, found 65534"):
        PosixRemote(str(tmp_path)).put("n/object", [NEW])


def test_directories_that_are_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    for target in ("elsewhere", "missing"):
        (tmp_path / "n").symlink_to(tmp_path / target)
        with pytest.raises(TierError, match="found a link"):
            PosixRemote(str(tmp_path)).put("n/object", [NEW])
        (tmp_path / "n").unlink()
    assert not os.listdir(tmp_path / "elsewhere")


def test_a_linked_file_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    (tmp_path / "object").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(tmp_path / "object", exclusive=True)
    write(tmp_path / "object")
    assert victim.read_bytes() == OLD
    assert not (tmp_path / "object").is_symlink()


def test_links_are_not_read_through(tmp_path: Path) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True, mode=0o700)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "object").write_bytes(OLD)
    (tmp_path / "tree" / "object").symlink_to(secret / "object")
    (tmp_path / "tree" / "d" / "link").symlink_to(secret)
    remote = PosixRemote(str(tmp_path / "tree"))
    for path in ("object", "d/link/object"):
        with pytest.raises(IntegrityError, match="links are never followed"):
            remote.get(path)
    assert remote.size("object") is None


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "directory").mkdir()
    for entry in ("pipe", "directory"):
        with pytest.raises(IntegrityError, match="expected a regular file"):
            files.read(str(tmp_path / entry))
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(IntegrityError, match="at most 1,024 bytes"):
        files.read(str(tmp_path / "large"), limit=1024)


# -- removal --------------------------------------------------------------------------------------------------------------


def test_removal_does_not_follow_links_and_counts_what_it_freed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_bytes(OLD)
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "object").write_bytes(NEW)
    (tree / "a" / "file").symlink_to(outside / "keep")
    (tree / "a" / "directory").symlink_to(outside)
    os.mkfifo(tree / "pipe")
    assert files.remove_tree(str(tree)) == len(NEW)
    assert files.remove_tree(str(tree)) == 0
    assert (outside / "keep").read_bytes() == OLD
    tree.symlink_to(outside)
    assert files.remove_tree(str(tree)) == 0
    assert (outside / "keep").exists()
    assert not tree.is_symlink()


def test_two_that_remove_the_same_tree_free_each_byte_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for n in range(300):
        (tree / str(n % 7)).mkdir(parents=True, exist_ok=True)
        (tree / str(n % 7) / str(n)).write_bytes(b"12345")
    freed: list[int] = []
    threads = [threading.Thread(target=lambda: freed.append(files.remove_tree(str(tree)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not tree.exists()
    assert len(freed) == 4
    assert sum(freed) == 1500


def test_a_damaged_local_copy_behind_a_link_is_not_used(tmp_path: Path) -> None:
    node = open_node([TierConfig(str(tmp_path / "tier"))])
    root = versions.write_local(node, "n", 1)
    directory = Path(node.tiers[0].home) / "n" / root.directory / "u"
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    row = versions.rows(node, root)[0]
    with pytest.raises(BlockLost, match="links are never followed"):
        reader.read_verified(row, reader.local_copies(node, "n", root.directory, row), what="block")
    node.close()
