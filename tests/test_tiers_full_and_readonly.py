"""Tiers on real small file systems: full, read-only, shared by processes, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from veloc_dask.storage import blocks, files, reader, tiers
from veloc_dask.storage.board import Board
from veloc_dask.storage.errors import ConfigError, TierError
from veloc_dask.storage.remote import PosixRemote, Remote
from veloc_dask.storage.tiers import Node, TierConfig, open_node
from veloc_dask.storage.writer import Stored, Writer
from veloc_dask.testing import faults
from veloc_dask.testing.processes import Child

NAME, DIRECTORY = "n", "v00000001-" + "a" * 32
MIB = 1 << 20
BLOCK = np.arange(MIB // 8, dtype="i8")
STORED = MIB + 4  # with its checksum

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@pytest.fixture(autouse=True)
def no_second_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails here fails for ever: waiting between the tries would take minutes."""
    monkeypatch.setattr("veloc_dask.storage.remote.RETRY_S", ())


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not possible here: {done.stderr.strip()}")


Mount = Callable[..., Path]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Mount]:
    """Mounts small file systems, and unmounts them whatever happens."""
    mounted: list[Path] = []

    def make(name: str, size: str = "16m", options: str = "") -> Path:
        place = tmp_path / name
        place.mkdir()
        mount("-t", "tmpfs", "-o", f"size={size},mode=700{options}", "veloc-test", str(place))
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        if subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def opened() -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as stack:

        def make(*configs: TierConfig) -> Node:
            node = open_node(configs)
            stack.callback(node.close)
            return node

        yield make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time passes for the tiers when the test says so."""
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    monkeypatch.setattr(tiers, "time", Clock)

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def store(
    node: Node, number: int, remote: Remote | None = None, value: np.ndarray[tuple[int], np.dtype[np.int64]] = BLOCK
) -> Stored:
    spec = blocks.ItemSpec("u", "blocks", (1000,))
    return Writer(NAME, node, remote).store(value, spec, (number,), DIRECTORY, allow_pickle=False)


def in_frame(value: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Bytes of a block's file."""
    return value.nbytes + 12


def held(path: Path | str) -> int:
    return sum(n for _, n in files.sizes(str(path)))


def assert_books_are_right(node: Node) -> None:
    for tier in node.tiers:
        assert tier.board.reserved == 0
        assert tier.board.used_nbytes(0) == held(tier.home)


def where(node: Node, stored: Stored) -> list[str]:
    return [t.path for t, _ in node.copies(f"{NAME}/{DIRECTORY}/{stored.row.object}")]


# -- full -----------------------------------------------------------------------------------------------------------------


@needs_mount
def test_full_tiers_are_passed_one_by_one(small: Mount, opened: Callable[..., Node], tmp_path: Path) -> None:
    """P07: the first tier, then the second, then the remote one, then an error that names each of them."""
    fast, slow, far = small("fast", "4m"), small("slow", "8m"), small("far", "4m")
    node = opened(TierConfig(str(fast)), TierConfig(str(slow)))
    remote = PosixRemote(str(far))
    remote.open()
    seen = []
    for number in range(100):
        try:
            stored = store(node, number, remote)
        except TierError as error:
            text = str(error)
            break
        seen.append(where(node, stored) or ["remote"])
        copies = [*reader.local_copies(node, NAME, DIRECTORY, stored.row)]
        if not stored.node:
            copies.append(reader.remote_copy(remote, NAME, DIRECTORY, stored.row))
        reader.read_verified(stored.row, copies, what="block")
    assert seen == sorted(seen, key=[[str(fast)], [str(slow)], ["remote"]].index)
    assert [seen.count([p]) for p in (str(fast), str(slow), "remote")] == [3, 7, 3]
    for part in (f"tier {fast}", f"tier {slow}", f"remote {far}", "No space left on device"):
        assert part in text
    assert_books_are_right(node)
    node.remove_tree(NAME)
    assert_books_are_right(node)
    assert where(node, store(node, 0, remote)) == [str(fast)]


@needs_mount
def test_a_tier_that_fills_up_in_mid_write_gives_the_space_back(
    small: Mount, opened: Callable[..., Node], clock: Callable[[float], None]
) -> None:
    """The file system's own count says that there is room, and it lies, as quotas do."""
    fast, slow = small("fast", "4m"), small("slow", "16m")
    node = opened(TierConfig(str(fast)), TierConfig(str(slow)))
    (fast / "others").write_bytes(bytes(2 * MIB))
    (fast / "sparse").write_bytes(b"")

    def fill(**context: object) -> None:
        with contextlib.suppress(OSError), open(fast / "sparse", "wb") as file:
            while True:
                file.write(bytes(65536))
                file.flush()

    with faults.arm("tier.reserved", faults.on_call(1, fill)):
        stored = store(node, 0)
    assert where(node, stored) == [str(slow)]
    assert held(node.tiers[0].home) == 0
    assert_books_are_right(node)
    assert "No space left" in node.tiers[0].trouble
    (fast / "sparse").unlink()
    assert where(node, store(node, 1)) == [str(slow)]  # set aside for a while
    clock(1.5)
    assert where(node, store(node, 2)) == [str(fast)]
    assert node.tiers[0].trouble == ""


@needs_mount
@pytest.mark.parametrize("inodes", [False, True])
def test_a_worker_that_starts_again_on_a_full_tier_goes_on(
    small: Mount, opened: Callable[..., Node], inodes: bool
) -> None:
    """It finds what it holds, writes to the next tier, and uses the full one again once there is room."""
    fast = small("fast", "2m", ",nr_inodes=40")
    configs = TierConfig(str(fast)), TierConfig(str(fast.parent / "disk"))
    before = open_node(configs)
    kept = store(before, 0)
    before.close()
    filler = fast / "filler"
    filler.mkdir()
    with contextlib.suppress(OSError):
        if inodes:
            for n in range(100):
                (filler / str(n)).touch()
        else:
            with open(filler / "x", "wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
    with Child(lambda: start_again(configs, kept)) as child:  # a touch of an unbacked page would kill it
        assert child.result() == (before.uuid, str(configs[1].path))
    for entry in filler.iterdir():
        entry.unlink()
    node = opened(*configs)
    assert where(node, store(node, 2, value=BLOCK[:100])) == [str(fast)]


def start_again(configs: tuple[TierConfig, ...], kept: Stored) -> tuple[str, str]:
    node = open_node(configs)
    reader.read_verified(kept.row, reader.local_copies(node, NAME, DIRECTORY, kept.row), what="block")
    (place,) = where(node, store(node, 1))
    node.close()
    return node.uuid, place


# -- read-only ------------------------------------------------------------------------------------------------------------


@needs_mount
def test_a_read_only_tier_is_set_aside_and_used_again(
    small: Mount, opened: Callable[..., Node], clock: Callable[[float], None], tmp_path: Path
) -> None:
    """P08."""
    fast = small("fast")
    node = opened(TierConfig(str(fast)), TierConfig(str(tmp_path / "slow")))
    before = store(node, 0)
    assert where(node, before) == [str(fast)]
    mount("-o", "remount,ro", str(fast))
    assert where(node, store(node, 1)) == [str(tmp_path / "slow")]
    assert "Read-only file system" in node.tiers[0].trouble
    reader.read_verified(before.row, reader.local_copies(node, NAME, DIRECTORY, before.row), what="block")
    node.put(f"{NAME}/{DIRECTORY}/root.json", b"x")
    assert node.tiers[1].find(f"{NAME}/{DIRECTORY}/root.json")
    for pause in (5, 10, 20, 40, 60, 60):  # the longer it lasts, the less often it is tried
        clock(pause - 1)
        assert not node.tiers[0].device().usable
        assert where(node, store(node, 1)) == [str(tmp_path / "slow")]
        clock(1.001)
        assert node.tiers[0].device().usable
        assert where(node, store(node, 1)) == [str(tmp_path / "slow")]
    mount("-o", "remount,rw", str(fast))
    assert where(node, store(node, 2)) == [str(tmp_path / "slow")]
    clock(60.001)
    assert where(node, store(node, 3)) == [str(fast)]
    assert_books_are_right(node)


@needs_mount
def test_without_another_tier_the_error_says_what_happened_before(small: Mount, opened: Callable[..., Node]) -> None:
    fast = small("fast")
    node = opened(TierConfig(str(fast)))
    mount("-o", "remount,ro", str(fast))
    for _ in range(2):
        with pytest.raises(TierError, match=r"tier .*/fast: .*Read-only file system"):
            store(node, 0)
    mount("-o", "remount,rw", str(fast))
    assert_books_are_right(node)


# -- capacity -------------------------------------------------------------------------------------------------------------


def test_capacity_holds_for_processes_that_write_at_the_same_time(tmp_path: Path, opened: Callable[..., Node]) -> None:
    """Four processes want four times as much as there is; two are killed, one of them with a file half written.

    These two stand still until the others are done, so that it is certain how far they got.
    """
    value = BLOCK[:2048]
    size = in_frame(value)
    capacity = 20 * size + size // 2
    path = tmp_path / "tier"
    config = TierConfig(str(path), capacity)
    node = opened(config)
    peak = [0]

    def fill(writer: int) -> int:
        mine = open_node([config])
        while writer < 2 and not (tmp_path / "go").exists():
            pass
        stored = 0
        for number in range(20):
            with contextlib.suppress(TierError):
                store(mine, 100 * writer + number, value=value)
                stored += 1
        mine.close()
        return stored

    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                peak[0] = max(peak[0], held(node.tiers[0].home))

    watcher = threading.Thread(target=watch)
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(fill, w)) for w in range(2)]
        with faults.arm("file.before_rename", faults.on_call(4, faults.stop)):
            children.append(stack.enter_context(Child(fill, 2)))
        with faults.arm("tier.before_settle", faults.on_call(2, faults.stop)):
            children.append(stack.enter_context(Child(fill, 3)))
        watcher.start()
        try:
            for child in children[2:]:
                child.wait_until_stopped()
            (tmp_path / "go").touch()
            stored = [child.result() for child in children[:2]]
            for child in children[2:]:
                child.kill()
        finally:
            done.set()
            watcher.join()
    assert max(peak[0], held(node.tiers[0].home)) <= capacity
    # 3 and 1 by the killed ones, and the bytes of the two that they had under way stay on the books
    assert sum(stored) == 20 - 3 - 1 - 2
    board = node.tiers[0].board
    assert board.used_nbytes(0) == 20 * size
    with pytest.raises(TierError, match="bytes used"):
        store(node, 500, value=value)
    # a process that starts now removes the half written file, and gets that room; the complete one is still held
    with Child(fill, 4) as child:
        assert child.result() == 1
    assert held(node.tiers[0].home) == 19 * size + size
    assert board.used_nbytes(0) == 20 * size
    node.close()
    # with nobody left, the disk itself is the truth
    again = opened(config)
    assert_books_are_right(again)


def test_two_threads_do_not_both_take_the_last_room(tmp_path: Path, opened: Callable[..., Node]) -> None:
    value = BLOCK[:512]
    node = opened(TierConfig(str(tmp_path / "tier"), 5 * in_frame(value)))
    writers = [Writer(f"{NAME}{n}", node, None) for n in range(4)]  # one for each checkpoint name
    spec = blocks.ItemSpec("u", "blocks", (1000,))
    stored = []

    def write(writer: Writer) -> None:
        for number in range(5):
            with contextlib.suppress(TierError):
                stored.append(writer.store(value, spec, (number,), DIRECTORY, allow_pickle=False))

    threads = [threading.Thread(target=write, args=(w,)) for w in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored) == 5
    assert_books_are_right(node)


def test_writing_a_block_again_is_counted_once(tmp_path: Path, opened: Callable[..., Node]) -> None:
    node = opened(TierConfig(str(tmp_path / "tier"), 10 * MIB))
    for _ in range(3):
        store(node, 0)
        node.put(f"{NAME}/{DIRECTORY}/root.json", b"x" * 100)
    assert node.tiers[0].create(f"{NAME}/claim", b"12345")
    assert not node.tiers[0].create(f"{NAME}/claim", b"1")
    assert_books_are_right(node)


def test_small_files_prefer_a_tier_with_room_and_are_never_refused_for_capacity(
    tmp_path: Path, opened: Callable[..., Node]
) -> None:
    value = BLOCK[:512]
    fast, slow = TierConfig(str(tmp_path / "fast"), in_frame(value)), TierConfig(str(tmp_path / "slow"), 50)
    node = opened(fast, slow)
    store(node, 0, value=value)
    node.put("n/a", b"x" * 50)
    assert node.tiers[1].find("n/a")
    node.put("n/b", b"x" * 50)
    assert node.tiers[0].find("n/b")
    assert_books_are_right(node)


def test_a_failing_encoder_gives_its_reservation_back(tmp_path: Path, opened: Callable[..., Node]) -> None:
    node = opened(TierConfig(str(tmp_path / "tier"), 10 * MIB))

    def buffers() -> Iterator[bytes]:
        yield b"x" * 100
        raise RuntimeError("cannot go on")

    with pytest.raises(RuntimeError, match="cannot go on"):
        node.tiers[0].write("n/x", buffers(), 1000)
    assert_books_are_right(node)
    assert held(tmp_path / "tier" / f"veloc-{os.geteuid()}" / node.uuid) == 0


def test_a_removed_directory_is_made_again(tmp_path: Path, opened: Callable[..., Node]) -> None:
    node = opened(TierConfig(str(tmp_path / "tier"), 10 * MIB))
    store(node, 0)
    files.remove_tree(os.path.join(node.tiers[0].home, NAME))
    stored = store(node, 1)
    reader.read_verified(stored.row, reader.local_copies(node, NAME, DIRECTORY, stored.row), what="block")


# -- the board itself -----------------------------------------------------------------------------------------------------


def test_a_slot_that_somebody_removed_comes_back(tmp_path: Path) -> None:
    """A process in another container cannot see that its owner lives."""
    board_place, data = tmp_path / "board", tmp_path / "data"
    board_place.mkdir()
    data.mkdir()
    board = Board(str(board_place), str(data))
    board.reserve(100)
    for slot in board_place.iterdir():
        slot.unlink()
    board.settle(100, 100)
    with Child(lambda: Board(str(board_place), str(data)).used_nbytes(0)) as child:
        assert child.result() == 100
    assert not [e for e in board_place.iterdir() if e.suffix != ".slot"]


def test_garbage_on_the_board_is_ignored(tmp_path: Path) -> None:
    board_place, data = tmp_path / "board", tmp_path / "data"
    board_place.mkdir()
    data.mkdir()
    for name, content in (("a.slot", b""), ("b.slot", b"x" * 48), ("c.slot", b"x" * 4096), ("d", b"x")):
        (board_place / name).write_bytes(content)
    (board_place / "e.slot").symlink_to(data)
    (data / "x").write_bytes(b"12345")
    assert Board(str(board_place), str(data)).used_nbytes(0) == 5


# -- who the tier belongs to ----------------------------------------------------------------------------------------------


def test_a_marker_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    node = open_node([TierConfig(str(tmp_path / "tier"))])
    node.close()
    marker = tmp_path / "tier" / f"veloc-{os.geteuid()}" / "node.json"
    for content in (b"", b"{}", b"{" * 5000, b"x" * 5000, b'{"node": "../..", "host": ""}', b"\xff"):
        marker.unlink()
        marker.write_bytes(content)
        with pytest.raises(ConfigError, match="not a node marker"):
            open_node([TierConfig(str(tmp_path / "tier"))])
    marker.unlink()
    (tmp_path / "other").write_bytes(b'{"node": "%s", "host": ""}' % (b"a" * 32))
    marker.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="links are never followed"):
        open_node([TierConfig(str(tmp_path / "tier"))])


def test_processes_that_start_together_are_one_node(tmp_path: Path) -> None:
    def start() -> str:
        while not (tmp_path / "go").exists():
            pass
        node = open_node([TierConfig(str(tmp_path / "a")), TierConfig(str(tmp_path / "b"))])
        node.close()
        return node.uuid

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(start)) for _ in range(6)]
        (tmp_path / "go").touch()
        assert len({child.result() for child in children}) == 1


def test_a_tier_in_a_place_that_others_own_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "tier" / f"veloc-{os.geteuid()}"
    place.mkdir(parents=True)
    os.chmod(place, 0o777)
    with pytest.raises(ConfigError, match="group or others may write"):
        open_node([TierConfig(str(tmp_path / "tier"))])


def test_errors_without_a_number_set_a_tier_aside_too(tmp_path: Path, opened: Callable[..., Node]) -> None:
    node = opened(TierConfig(str(tmp_path / "fast")), TierConfig(str(tmp_path / "slow")))
    (Path(node.tiers[0].home) / NAME).symlink_to(tmp_path)
    assert where(node, store(node, 0)) == [str(tmp_path / "slow")]
    assert "found a link" in node.tiers[0].trouble
