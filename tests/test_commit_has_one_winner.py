"""A version number goes to one attempt, whatever is slow, killed, repeated or lost on the way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from veloc_dask.storage import commit, layout, retention
from veloc_dask.storage import root as roots
from veloc_dask.storage.errors import VersionExists
from veloc_dask.storage.remote import FsspecRemote, PosixRemote, Remote
from veloc_dask.storage.tiers import Node, TierConfig, open_node
from veloc_dask.testing import faults, versions
from veloc_dask.testing.processes import Child
from veloc_dask.testing.remotes import LostReply, NoDirectories, WrappedRemote

NAME = "n"
A, B, C = "a" * 32, "b" * 32, "c" * 32


@pytest.fixture(autouse=True)
def no_second_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails here fails for ever: waiting between the tries would take minutes."""
    monkeypatch.setattr("veloc_dask.storage.remote.RETRY_S", ())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = open_node([TierConfig(str(tmp_path / "tier"))])
    yield node
    node.close()


@pytest.fixture
def remote(tmp_path: Path) -> PosixRemote:
    remote = PosixRemote(str(tmp_path / "remote"))
    remote.open()
    return remote


def outcome(function: Callable[[], object]) -> str:
    """What a call ended with, so that a child can tell."""
    try:
        function()
    except VersionExists as error:
        return f"exists: {error}"
    return "saved"


def retain(remote: Remote, run: int, keep: int = 1) -> retention.Removed:
    return retention.retain_remote(remote, NAME, keep=keep, run=run, pinned=(), active=())


# -- races ----------------------------------------------------------------------------------------------------------------


def test_two_processes_and_one_number(tmp_path: Path, node: Node, remote: PosixRemote) -> None:
    """P16: exactly one wins, the other gets VersionExists, nothing is mixed."""
    nversions = 25

    def save_all(attempts: str) -> list[str]:
        go = tmp_path / "go"
        while not go.exists():
            pass
        return [
            outcome(lambda v=v: versions.save(node, remote, NAME, v, 1, attempt=f"{attempts}{v:031x}"))
            for v in range(1, nversions + 1)
        ]

    with contextlib.ExitStack() as stack:
        children = {letter: stack.enter_context(Child(save_all, letter)) for letter in "ab"}
        (tmp_path / "go").touch()
        ends = {letter: child.result() for letter, child in children.items()}
    seen = versions.assert_whole(remote, NAME)
    assert list(seen) == list(range(1, nversions + 1))
    for version, attempt in seen.items():
        winner = attempt[0]
        loser = "b" if winner == "a" else "a"
        assert ends[winner][version - 1] == "saved"
        assert "another attempt has committed it" in ends[loser][version - 1]


def test_each_run_has_its_own_number(tmp_path: Path, remote: PosixRemote) -> None:
    def take() -> list[int]:
        while not (tmp_path / "go").exists():
            pass
        return [commit.acquire_run(remote, NAME, f"{os.getpid()}-{n}") for n in range(10)]

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(take)) for _ in range(3)]
        (tmp_path / "go").touch()
        taken = [n for child in children for n in child.result()]
    assert sorted(taken) == list(range(1, 31))


def test_a_lower_run_may_not_commit(node: Node, remote: PosixRemote) -> None:
    """P13."""
    first = commit.acquire_run(remote, NAME, "first")
    root, documents = versions.write(node, remote, NAME, 1, first)
    second = commit.acquire_run(remote, NAME, "second")
    assert second > first
    with pytest.raises(VersionExists, match="run 2 has taken over this name"):
        commit.commit(remote, root, documents)
    assert versions.assert_whole(remote, NAME) == {}
    versions.save(node, remote, NAME, 1, second, attempt=B)
    assert versions.assert_whole(remote, NAME) == {1: B}


# -- replies --------------------------------------------------------------------------------------------------------------


def test_a_lost_reply_is_recognised(node: Node, remote: PosixRemote) -> None:
    assert commit.acquire_run(PosixRemote(remote.root), NAME, "me") == 1
    versions.save(node, LostReply(remote), NAME, 1, 1, attempt=A)
    assert versions.assert_whole(remote, NAME) == {1: A}
    with pytest.raises(VersionExists):
        versions.save(node, LostReply(remote), NAME, 1, 1, attempt=B)
    assert versions.assert_whole(remote, NAME) == {1: A}


def test_a_lost_reply_to_a_run_number_is_recognised(remote: PosixRemote) -> None:
    with pytest.raises(OSError, match="timed out"):
        commit.acquire_run(LostReply(remote), NAME, "me")
    assert commit.acquire_run(remote, NAME, "me") == 2  # the numbers only have to grow
    replies = LostReply(remote)
    with contextlib.suppress(OSError):
        commit.acquire_run(replies, NAME, "other")
    assert commit.newest_run(remote, NAME) == 3


def test_a_commit_twice_is_one(node: Node, remote: PosixRemote) -> None:
    """P15, also when a later run has taken over in between: the version is there, and was before."""
    root, documents = versions.write(node, remote, NAME, 1, 1, attempt=A)
    commit.commit(remote, root, documents)
    commit.commit(remote, root, documents)
    commit.acquire_run(remote, NAME, "x")
    commit.acquire_run(remote, NAME, "y")
    commit.commit(remote, root, documents)
    assert versions.assert_whole(remote, NAME) == {1: A}


def test_a_recognised_root_is_durable(node: Node, remote: PosixRemote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call has linked the root and failed to sync its directory; the second one must not just believe it."""
    root, documents = versions.write(node, remote, NAME, 1, 1, attempt=A)
    original = os.fsync
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if synced[-1] == f"{remote.root}/{NAME}" and synced.count(synced[-1]) == 1:
            raise OSError(5, "sync failed")
        original(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    commit.commit(remote, root, documents)
    assert synced.count(f"{remote.root}/{NAME}") == 2


# -- killed ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["commit.documents", "commit.fenced", "commit.created", "root.after_rename"])
def test_a_killed_commit_is_old_or_new(node: Node, remote: PosixRemote, point: str) -> None:
    """P02."""
    versions.save(node, remote, NAME, 1, 1, attempt=A)
    root, documents = versions.write(node, remote, NAME, 2, 1, attempt=B)
    action = faults.kill
    if point.startswith("root."):
        point, action = point.replace("root", "file"), faults.on_path(f"/{layout.root_name(2)}", faults.kill)
    with faults.arm(point, action), Child(commit.commit, remote, root, documents) as child:
        assert child.exit_code() == -signal.SIGKILL
    committed = point in ("commit.created", "file.after_rename")
    assert versions.assert_whole(remote, NAME) == ({1: A, 2: B} if committed else {1: A})
    commit.commit(remote, root, documents)  # whoever takes over finishes it
    assert versions.assert_whole(remote, NAME) == {1: A, 2: B}


# -- asleep ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def asleep(node: Node, remote: Remote, version: int, run: int, attempt: str, point: str) -> Iterator[Child]:
    """A writer that stands still at a point of its commit."""
    root, documents = versions.write(node, remote, NAME, version, run, attempt=attempt)
    with faults.arm(point, faults.stop):
        child = Child(outcome, lambda: commit.commit(remote, root, documents))
    with child:
        child.wait_until_stopped()
        yield child


POINTS = ["commit.documents", "commit.fenced", "file.before_rename"]


@pytest.mark.parametrize("objects", [False, True], ids=["file system", "object store"])
@pytest.mark.parametrize("point", ["commit.documents", "commit.fenced"])
def test_a_collected_writer_that_wakes_up_cannot_commit(
    node: Node, remote: PosixRemote, point: str, objects: bool
) -> None:
    """P19: its place was taken with a tombstone before its blocks went."""
    store: Remote = NoDirectories(remote) if objects else remote
    run = commit.acquire_run(store, NAME, "old")
    with asleep(node, store, 1, run, A, point) as sleeper:
        newer = commit.acquire_run(store, NAME, "new")
        versions.save(node, store, NAME, 2, newer, attempt=B)
        assert retain(store, newer).directories == (layout.attempt_name(1, A),)
        sleeper.resume()
        assert sleeper.result().startswith("exists: ")
    assert versions.assert_whole(remote, NAME) == {2: B}


@pytest.mark.parametrize("objects", [False, True], ids=["file system", "object store"])
@pytest.mark.parametrize("point", ["commit.documents", "commit.fenced"])
def test_nor_after_its_number_was_used_and_pruned(node: Node, remote: PosixRemote, point: str, objects: bool) -> None:
    """The root that kept it from committing is gone again; a tombstone must have taken its place."""
    store: Remote = NoDirectories(remote) if objects else remote
    run = commit.acquire_run(store, NAME, "old")
    with asleep(node, store, 1, run, A, point) as sleeper:
        newer = commit.acquire_run(store, NAME, "new")
        versions.save(node, store, NAME, 1, newer, attempt=B)
        versions.save(node, store, NAME, 2, newer, attempt=C)
        removed = retain(store, newer)
        assert removed.versions == (1,)
        assert set(removed.directories) == {layout.attempt_name(1, A), layout.attempt_name(1, B)}
        retain(store, newer)
        sleeper.resume()
        assert sleeper.result().startswith("exists: ")
    assert versions.assert_whole(remote, NAME) == {2: C}
    retain(store, newer)
    left = remote.names(NAME)
    assert [e for e in left if e.endswith(".dead")] == []


@pytest.mark.parametrize("point", POINTS)
def test_nor_after_another_worker_has_committed_the_same_attempt_and_it_was_pruned(
    node: Node, remote: PosixRemote, point: str
) -> None:
    """The order to commit was sent again, to another worker, while the first one slept."""
    run = commit.acquire_run(remote, NAME, "me")
    root, documents = versions.write(node, remote, NAME, 1, run, attempt=A)
    action = faults.on_path("/v00000001.json", faults.stop) if point.startswith("file.") else faults.stop
    with faults.arm(point, action):
        child = Child(outcome, lambda: commit.commit(remote, root, documents))
    with child:
        child.wait_until_stopped()
        commit.commit(remote, root, documents)
        versions.save(node, remote, NAME, 2, run, attempt=B)
        assert retain(remote, run).versions == (1,)
        child.resume()
        assert "given up as dead" in child.result()
    assert versions.assert_whole(remote, NAME) == {2: B}
    retain(remote, run)
    assert versions.assert_whole(remote, NAME) == {2: B}


@pytest.mark.parametrize("objects", [False, True], ids=["file system", "object store"])
@pytest.mark.parametrize("point", POINTS)
def test_nor_after_its_cluster_has_given_the_attempt_up(
    node: Node, remote: PosixRemote, point: str, objects: bool
) -> None:
    store: Remote = NoDirectories(remote) if objects else remote
    root, documents = versions.write(node, store, NAME, 1, 1, attempt=A)
    action = faults.on_path("/v00000001.json", faults.stop) if point.startswith("file.") else faults.stop
    with faults.arm(point, action):
        child = Child(outcome, lambda: commit.commit(store, root, documents))
    with child:
        child.wait_until_stopped()
        assert retention.discard_remote(store, NAME, root.directory, run=1, may_commit=True)
        child.resume()
        assert child.result().startswith("exists: ")
    assert versions.assert_whole(remote, NAME) == {}


def test_an_attempt_that_turns_out_to_be_a_version_is_not_given_up(node: Node, remote: PosixRemote) -> None:
    """The commit worked, and all that came back was an error."""
    root = versions.save(node, remote, NAME, 1, 1, attempt=A)
    for may_commit in (True, False):
        assert not retention.discard_remote(remote, NAME, root.directory, run=1, may_commit=may_commit)
    assert versions.assert_whole(remote, NAME) == {1: A}


@pytest.mark.parametrize("pruned", [False, True])
def test_a_commit_in_the_last_moment_leaves_no_version_with_holes(
    node: Node, remote: PosixRemote, pruned: bool
) -> None:
    """After the look at the root, and before the directory loses its name."""
    root, documents = versions.write(node, remote, NAME, 1, 1, attempt=A)

    class Late(WrappedRemote):
        def remove_tree(self, path: str) -> None:
            if path.endswith(root.directory):
                commit.commit(remote, root, documents)
            super().remove_tree(path)

    if pruned:
        commit.commit(remote, root, documents)
        versions.save(node, remote, NAME, 2, 1, attempt=B)
        retain(Late(remote), 1)
        assert versions.assert_whole(remote, NAME) == {2: B}
    else:
        assert retention.discard_remote(Late(remote), NAME, root.directory, run=1, may_commit=False)
        assert versions.assert_whole(remote, NAME) == {}


def test_giving_up_before_the_commit_leaves_the_number_free(node: Node, remote: PosixRemote) -> None:
    root, _ = versions.write(node, remote, NAME, 1, 1, attempt=A)
    assert retention.discard_remote(remote, NAME, root.directory, run=1, may_commit=False)
    assert remote.names(NAME) == []
    versions.save(node, remote, NAME, 1, 1, attempt=B)
    assert versions.assert_whole(remote, NAME) == {1: B}


def test_a_version_without_its_table_is_not_committed(node: Node, remote: PosixRemote) -> None:
    root, documents = versions.write(node, remote, NAME, 1, 1)
    remote.remove(f"{NAME}/{root.directory}/{root.segments[0].path}")
    with pytest.raises(VersionExists, match="its files are gone"):
        commit.commit(remote, root, documents)
    assert commit.committed(remote, NAME) == []


def test_a_root_that_lies_elsewhere_is_refused(node: Node, remote: PosixRemote) -> None:
    root = versions.save(node, remote, NAME, 1, 1)
    remote.put(f"{NAME}/{layout.root_name(7)}", [roots.encode(root)])
    with pytest.raises(OSError, match="expected 'n' version 7, found 'n' version 1"):
        commit.read_root(remote, NAME, 7)


def test_in_memory_too() -> None:
    store = FsspecRemote("memory://one-winner", {})
    store.open()
    try:
        with contextlib.ExitStack() as stack:
            node = Node("", ())
            stack.callback(node.close)
            assert commit.acquire_run(store, NAME, "me") == 1
            versions.save(node, store, NAME, 1, 1, attempt=A)
            with pytest.raises(VersionExists):
                versions.save(node, store, NAME, 1, 1, attempt=B)
            assert versions.assert_whole(store, NAME) == {1: A}
    finally:
        store.remove_tree("")
