"""Retention never deletes the newest version, nor what is pinned or under way, and a crash in it leaves only garbage."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veloc_dask.storage import commit, layout, retention
from veloc_dask.storage import root as roots
from veloc_dask.storage.remote import FsspecRemote, PosixRemote, Remote
from veloc_dask.storage.tiers import Node, TierConfig, open_node
from veloc_dask.testing import faults, versions
from veloc_dask.testing.processes import Child
from veloc_dask.testing.remotes import NoDirectories

NAME = "n"
ME = "f" * 32
NO_TIERS = Node("", ())
fresh = itertools.count()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = open_node([TierConfig(str(tmp_path / "fast")), TierConfig(str(tmp_path / "slow"))])
    yield node
    node.close()


@pytest.fixture
def remote(tmp_path: Path) -> PosixRemote:
    remote = PosixRemote(str(tmp_path / "remote"))
    remote.open()
    return remote


def retain(
    remote: Remote, run: int | None = 1, keep: int = 1, pinned: tuple[str, ...] = (), active: tuple[str, ...] = ()
) -> retention.Removed:
    return retention.retain_remote(remote, NAME, keep=keep, run=run, pinned=pinned, active=active)


def directories(remote: Remote) -> set[str]:
    return {e for e in remote.names(NAME) if layout.parse_attempt(e) is not None}


# -- the remote tier ------------------------------------------------------------------------------------------------------


def test_the_newest_stay(remote: PosixRemote) -> None:
    saved = [versions.save(NO_TIERS, remote, NAME, v, 1) for v in range(1, 6)]
    removed = retain(remote, keep=2)
    assert removed.versions == (1, 2, 3)
    assert removed.directories == tuple(r.directory for r in saved[:3])
    assert list(versions.assert_whole(remote, NAME)) == [4, 5]
    assert retain(remote, keep=2) == retention.Removed()
    assert retain(remote, keep=0) == retention.Removed()


def test_pinned_blocks_stay_until_they_are_not(remote: PosixRemote) -> None:
    root = versions.save(NO_TIERS, remote, NAME, 1, 1)
    versions.save(NO_TIERS, remote, NAME, 2, 1)
    pinned = (root.directory,)
    for _ in range(2):
        retain(remote, pinned=pinned)
        assert list(versions.assert_whole(remote, NAME)) == [2]
        versions.read(remote, root)  # its blocks can still be loaded
    assert retain(remote).directories == pinned
    assert root.directory not in directories(remote)


def test_what_is_under_way_stays(remote: PosixRemote) -> None:
    below, _ = versions.write(NO_TIERS, remote, NAME, 1, 1)
    versions.save(NO_TIERS, remote, NAME, 2, 1)
    above, _ = versions.write(NO_TIERS, remote, NAME, 3, 1)
    old = versions.save(NO_TIERS, remote, NAME, 0, 1)
    active = (below.directory, old.directory)  # the driver of `old` has not heard of its success yet
    assert retain(remote, active=active) == retention.Removed()
    assert {below.directory, above.directory, old.directory} < directories(remote)
    assert retain(remote).directories == (below.directory, old.directory)
    assert above.directory in directories(remote)  # it may be that of a living writer: numbers only grow


def test_a_lower_run_deletes_nothing(remote: PosixRemote) -> None:
    first = commit.acquire_run(remote, NAME, "first")
    for v in (1, 2):
        versions.save(NO_TIERS, remote, NAME, v, first)
    commit.acquire_run(remote, NAME, "second")
    assert retain(remote, run=first) == retention.Removed()
    assert list(versions.assert_whole(remote, NAME)) == [1, 2]


def test_who_never_saved_leaves_attempts_alone(remote: PosixRemote) -> None:
    attempt, _ = versions.write(NO_TIERS, remote, NAME, 1, 1)
    versions.save(NO_TIERS, remote, NAME, 2, 1)
    assert retain(remote, run=None) == retention.Removed()
    assert attempt.directory in directories(remote)


def test_a_damaged_root_keeps_its_files(remote: PosixRemote) -> None:
    roots_ = [versions.save(NO_TIERS, remote, NAME, v, 1) for v in (1, 2, 3)]
    path = f"{NAME}/{layout.root_name(3)}"
    good = remote.get(path).tobytes()
    remote.put(path, [good[:-10]])
    retain(remote)
    assert {roots_[1].directory, roots_[2].directory} == directories(remote)
    remote.put(path, [good])
    assert list(versions.assert_whole(remote, NAME)) == [2, 3]


def test_a_stopped_clock_changes_nothing(remote: PosixRemote) -> None:
    """P14: the newest version is the one with the highest number, whatever its files say of their age."""
    for v in (1, 2, 3):
        root = versions.save(NO_TIERS, remote, NAME, v, 1)
        day = 86400 * (10 - 5 * v)
        for path in (layout.root_name(v), root.directory):
            os.utime(Path(remote.root) / NAME / path, (time.time() + day, time.time() + day))
    retain(remote)
    assert list(versions.assert_whole(remote, NAME)) == [3]


def test_temporary_files_and_half_deleted_directories_are_swept(remote: PosixRemote) -> None:
    versions.save(NO_TIERS, remote, NAME, 1, 1)
    directory = Path(remote.root) / NAME
    (directory / ".gone-1" / "u").mkdir(parents=True)
    (directory / ".gone-1" / "u" / "object").write_bytes(b"x")
    commit.acquire_run(remote, NAME, "me")
    for place in (directory, directory / "runs"):
        for age, entry in ((7200, ".tmp-old"), (0, ".tmp-new")):
            (place / entry).write_bytes(b"x")
            os.utime(place / entry, (time.time() - age, time.time() - age))
    retain(remote)
    assert not {".gone-1", ".tmp-old"} & set(os.listdir(directory))
    assert set(os.listdir(directory / "runs")) == {".tmp-new", layout.run_name(1)}
    assert (directory / ".tmp-new").exists()
    assert [e for e in os.listdir(remote.root) if e.startswith(".veloc")] == []


def test_a_directory_loses_its_name_at_one_instant(remote: PosixRemote) -> None:
    """Before anything in it goes, so that no reader and no slow writer meets half of it."""
    root = versions.save(NO_TIERS, remote, NAME, 1, 1)
    seen = []

    def look(**context: object) -> None:
        (hidden,) = [e for e in remote.names(NAME) if e.startswith(".gone")]
        seen.append(remote.names(f"{NAME}/{hidden}/u/c"))
        assert root.directory not in remote.names(NAME)

    with faults.arm("retention.renamed", look):
        remote.remove_tree(f"{NAME}/{root.directory}")
    assert seen == [["0", "1"]]
    assert remote.names(NAME) == [layout.root_name(1)]


REMOTE_POINTS = ["retention.noted", "retention.hidden", "retention.renamed", "retention.deleted"]


@pytest.mark.parametrize("passage", [1, 2])
@pytest.mark.parametrize("point", REMOTE_POINTS)
def test_a_crash_leaves_only_garbage(remote: PosixRemote, point: str, passage: int) -> None:
    """P18: whole versions, and nothing that the next round does not remove."""
    versions.write(NO_TIERS, remote, NAME, 1, 1)  # dead, its number free
    versions.write(NO_TIERS, remote, NAME, 2, 1)  # dead, its number taken by another attempt
    for v in (2, 3, 4):
        newest = versions.save(NO_TIERS, remote, NAME, v, 1)
    with faults.arm(point, faults.on_call(passage, faults.kill)), Child(retain, remote) as child:
        assert child.exit_code() == -signal.SIGKILL
    assert 4 in versions.assert_whole(remote, NAME)
    for _ in range(2):
        retain(remote)
    assert versions.assert_whole(remote, NAME) == {4: newest.attempt}
    assert directories(remote) == {newest.directory}
    assert [e for e in remote.names(NAME) if not e.endswith(".json")] == [newest.directory]


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_history_keeps_the_newest_whole(data: st.DataObject) -> None:
    """A model: what was committed and not yet due for removal is there, whole; nothing else but tombstones."""
    store = FsspecRemote(f"memory://history-{next(fresh)}", {})
    store.open()
    remote = NoDirectories(store)
    try:
        committed: dict[int, str] = {}
        waiting: dict[str, roots.Root] = {}
        next_version = 1
        for _ in range(data.draw(st.integers(1, 12))):
            step = data.draw(st.sampled_from(["save", "write", "retain", "wake", "delete"]))
            if step == "save":
                committed[next_version] = versions.save(NO_TIERS, remote, NAME, next_version, 1).directory
                next_version += data.draw(st.integers(1, 2))
            elif step == "write":
                version = data.draw(st.integers(1, next_version))
                root, _ = versions.write(NO_TIERS, remote, NAME, version, 1)
                waiting[root.directory] = root
            elif step == "retain":
                keep = data.draw(st.integers(1, 3))
                pinned = data.draw(st.lists(st.sampled_from(sorted({*committed.values(), *waiting}) or [""])))
                removed = retain(remote, keep=keep, pinned=tuple(pinned))
                assert not set(pinned) & set(removed.directories)
                for version in sorted(committed)[:-keep]:
                    del committed[version]
            elif step == "delete" and committed:
                version = data.draw(st.sampled_from(sorted(committed)))
                retention.forget_remote(remote, NAME, version, run=1)
                del committed[version]
            elif step == "wake" and waiting:
                root = waiting.pop(data.draw(st.sampled_from(sorted(waiting))))
                documents = roots.documents(root.items, {})
                with contextlib.suppress(ValueError):
                    commit.commit(remote, root, documents)
                    committed[root.version] = root.directory
                    next_version = max(next_version, root.version + 1)
            seen = versions.assert_whole(remote, NAME)
            assert {v: layout.attempt_name(v, a) for v, a in seen.items()} == committed
    finally:
        store.remove_tree("")


# -- the node's tiers -----------------------------------------------------------------------------------------------------


def retain_local(
    node: Node, keep: int = 1, pinned: tuple[str, ...] = (), active: tuple[str, ...] = ()
) -> retention.Removed:
    return retention.retain_local(node, NAME, keep=keep, pinned=pinned, active=active, run_uuid=ME)


def test_the_newest_on_a_node_stay(node: Node) -> None:
    saved = [versions.write_local(node, NAME, v) for v in (1, 2, 3)]
    used = [t.board.used_nbytes(0) for t in node.tiers]
    assert retain_local(node).versions == (1, 2)
    assert node.entries(NAME) == [saved[2].directory]
    assert retention.local_root(node, NAME, saved[2].directory) == saved[2]
    assert sum(t.board.used_nbytes(0) for t in node.tiers) < sum(used) / 2


def test_pinned_and_active_on_a_node_stay(node: Node) -> None:
    saved = [versions.write_local(node, NAME, v) for v in (1, 2, 3)]
    retain_local(node, pinned=(saved[0].directory,), active=(saved[1].directory,))
    assert node.entries(NAME) == [r.directory for r in saved]
    assert versions.rows(node, saved[0])
    assert retention.local_root(node, NAME, saved[0].directory) is None  # not listed any more
    assert retention.local_root(node, NAME, saved[1].directory) == saved[1]
    retain_local(node)
    assert node.entries(NAME) == [saved[2].directory]


def test_what_a_living_process_of_another_cluster_writes_stays(node: Node) -> None:
    other, mine = f"v00000001-{'b' * 32}", f"v00000002-{'c' * 32}"

    def write() -> None:
        retention.own(node, NAME, other, "e" * 32)
        faults.stop()

    retention.own(node, NAME, mine, ME)
    with Child(write) as child:
        child.wait_until_stopped()
        assert retain_local(node).directories == (mine,)
        assert node.entries(NAME) == [other]
        child.kill()
    assert retain_local(node).directories == (other,)
    assert node.entries(NAME) == []


def test_a_process_in_another_container_is_not_judged(node: Node) -> None:
    directory = f"v00000001-{'b' * 32}"
    node.put(f"{NAME}/{directory}/.owner-{'e' * 32}-1-1-1", b"")
    assert retain_local(node).directories == ()
    assert node.entries(NAME) == [directory]


def test_one_tier_that_refuses_keeps_nothing_from_the_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P08: a tier turned read-only still has a file of an old version; the other tier is cleaned all the same."""
    saved = [versions.write_local(node, NAME, v) for v in (1, 2, 3)]
    fast, slow = node.tiers
    for root in saved[:2]:
        slow.write(f"{NAME}/{root.directory}/u/more", [b"x"], 1)

    def refuse(relative: str) -> None:
        raise OSError(30, "Read-only file system", relative)

    monkeypatch.setattr(fast, "remove_tree", refuse)
    assert retain_local(node).directories == ()
    for root in saved[:2]:
        assert fast.listdir(f"{NAME}/{root.directory}") != []
        assert slow.listdir(f"{NAME}/{root.directory}") == []
    assert retention.local_root(node, NAME, saved[2].directory) == saved[2]
    monkeypatch.undo()
    assert set(retain_local(node).directories) == {r.directory for r in saved[:2]}


def test_a_crash_on_a_node_leaves_only_garbage(node: Node) -> None:
    saved = [versions.write_local(node, NAME, v) for v in (1, 2)]
    with faults.arm("retention.local_hidden", faults.kill), Child(retain_local, node) as child:
        assert child.exit_code() == -signal.SIGKILL
    assert retention.local_root(node, NAME, saved[0].directory) is None
    assert retention.local_root(node, NAME, saved[1].directory) == saved[1]
    assert retain_local(node).directories == (saved[0].directory,)
    assert node.entries(NAME) == [saved[1].directory]


def test_a_planted_file_or_link_does_not_stop_retention(node: Node, tmp_path: Path) -> None:
    newest = versions.write_local(node, NAME, 3)
    home = Path(node.tiers[0].home) / NAME
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "keep").touch()
    (home / f"v00000001-{'a' * 32}").symlink_to(tmp_path / "outside")
    (home / f"v00000002-{'b' * 32}").write_bytes(b"a file")
    retain_local(node)
    assert node.entries(NAME) == [newest.directory]
    assert (tmp_path / "outside" / "keep").exists()
