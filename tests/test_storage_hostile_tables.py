"""Roots and tables round trip; whatever else lies in their place gives IntegrityError, quickly and in little memory."""

from __future__ import annotations

import os
import string
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloc_dask.storage import commit, layout, reader, table
from veloc_dask.storage import root as roots
from veloc_dask.storage.blocks import ItemSpec
from veloc_dask.storage.errors import BlockLost, IntegrityError
from veloc_dask.storage.remote import PosixRemote
from veloc_dask.storage.table import Row
from veloc_dask.storage.tiers import Node, TierConfig, open_node
from veloc_dask.testing import versions

A = "a" * 32
sizes = st.integers(0, 2**63 - 1)
words = st.text(string.ascii_letters + string.digits + "_=- äß", min_size=1, max_size=12).filter(lambda w: w.strip("."))
paths = st.lists(words, min_size=1, max_size=4).map("/".join)
row_strategy = st.builds(
    Row,
    item=paths,
    index=st.lists(sizes, max_size=4).map(tuple),
    object=paths,
    offset=sizes,
    stored_nbytes=sizes,
    nbytes=sizes,
    dtype=st.text(max_size=12),
    shape=st.lists(sizes, max_size=4).map(tuple),
    order=st.sampled_from(["", "C", "F"]),
    encoding=st.sampled_from(sorted(table.ENCODINGS)),
    codec=st.just(""),
    crc32c=st.integers(0, 2**32 - 1),
    digest=st.just(""),
)
ROWS = [Row("u", (n, 0), f"u/c/{n}/0", 0, 68, 64, "<i8", (8,), "C", "array", "", 1234 + n, "") for n in range(3)]
SEGMENT = table.encode_segment(ROWS)


def make_root(**fields: Any) -> roots.Root:
    root = roots.Root(
        format=roots.FORMAT,
        format_version=roots.FORMAT_VERSION,
        name="n",
        version=3,
        attempt=A,
        run=1,
        run_uuid="b" * 32,
        created="2020-01-01",
        structure={"u": [0, None, "x", 1.5]},
        items=[roots.Item("array", ItemSpec("u", "blocks", (3, 1)))],
        segments=[roots.Segment("table/00000.seg", "c" * 32, 3, len(SEGMENT), roots.sha256(SEGMENT))],
        documents={"zarr.json": "0" * 64},
        nblocks=3,
        nbytes=192,
    )
    return msgspec.structs.replace(root, **fields)


ROOT = roots.encode(make_root())


def sealed(body: bytes) -> bytes:
    """An envelope whose checksum is right: what somebody who can write to the store can make."""
    return b'{"body":' + body + b',"sha256":"' + roots.sha256(body).encode() + b'"}'


def with_body(**fields: Any) -> bytes:
    body = msgspec.json.decode(roots.encode(make_root()))["body"]
    return sealed(msgspec.json.encode({**body, **fields}, order="sorted"))


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def refused(decode: Callable[[], object]) -> bool:
    """Whether something was refused; with anything but IntegrityError the test fails."""
    try:
        decode()
    except IntegrityError:
        return True
    return False


# -- tables ---------------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(row_strategy, max_size=12))
def test_segments_round_trip(rows: list[Row]) -> None:
    """P29: and the same rows are the same bytes."""
    data = table.encode_segment(rows)
    assert table.decode_segment(data) == rows
    assert table.encode_segment(table.decode_segment(memoryview(data))) == data
    assert [table.decode_row(table.encode_row(r)) for r in rows] == rows


def test_every_truncation_of_a_segment_is_refused() -> None:
    for length in range(len(SEGMENT)):
        with pytest.raises(IntegrityError):
            table.decode_segment(SEGMENT[:length])
    with pytest.raises(IntegrityError):
        table.decode_segment(SEGMENT + b"\0")


def test_every_flipped_byte_of_a_segment_is_rows_or_refused(little_memory: None) -> None:
    """The root's sha256 finds it before this; but even without, nothing worse than other rows comes out."""
    nrefused = 0
    for position in range(len(SEGMENT)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(SEGMENT)
            damaged[position] ^= flip
            nrefused += refused(lambda d=bytes(damaged): table.decode_segment(d))
    assert nrefused > len(SEGMENT)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_segment(data: bytes) -> None:
    assert refused(lambda: table.decode_segment(data))
    assert refused(lambda: table.decode_segment(table.MAGIC + data))


messagepack = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=24) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(column=st.sampled_from(["nrows", "ints", "texts", "tuples"]), value=messagepack, name=st.integers(0, 6))
def test_a_segment_with_one_strange_column_is_rows_or_refused(column: str, value: Any, name: int) -> None:
    content = msgspec.msgpack.decode(SEGMENT[len(table.MAGIC) :])
    if isinstance(content[column], dict) and name:
        names = sorted(content[column])
        content[column][names[name % len(names)]] = value
    else:
        content[column] = value
    data = table.MAGIC + msgspec.msgpack.encode(content)
    if not refused(lambda: table.decode_segment(data)):
        assert len(table.decode_segment(data)) == content["nrows"] == 3


@pytest.mark.parametrize("nrows", [10**9, 2**63 - 1, -1, 2, 4])
def test_a_wrong_row_count_allocates_nothing(nrows: int, little_memory: None) -> None:
    content = msgspec.msgpack.decode(SEGMENT[len(table.MAGIC) :])
    with pytest.raises(IntegrityError, match="does not fit together"):
        table.decode_segment(table.MAGIC + msgspec.msgpack.encode({**content, "nrows": nrows}))


def test_more_rows_than_a_segment_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_SEGMENT_ROWS", 2)
    with pytest.raises(IntegrityError, match="expected at most 2 rows, found 3"):
        table.decode_segment(SEGMENT)


def test_a_segment_of_a_newer_release_is_refused() -> None:
    content = msgspec.msgpack.decode(SEGMENT[len(table.MAGIC) :])
    for changed in (
        {**content, "more": 1},
        {**content, "ints": {**content["ints"], "more": b""}},
        {**content, "texts": {**content["texts"], "more": {"values": [], "codes": b""}}},
    ):
        with pytest.raises(IntegrityError):
            table.decode_segment(table.MAGIC + msgspec.msgpack.encode(changed))
    with pytest.raises(IntegrityError, match="begins with"):
        table.decode_segment(b"VELOCTB2" + SEGMENT[8:])


OUTSIDE = ["/etc/passwd", "..", "../x", "u/../../x", "u//x", "u/", "", ".", "u/./x", "u\\x", "u/\0", "C:\\x", "/"]


@pytest.mark.parametrize("path", [*OUTSIDE, "x" * 1025, "u/" + "x" * 256])
def test_paths_that_lead_outside_are_refused(path: str) -> None:
    good = ROWS[0]
    for row in (msgspec.structs.replace(good, object=path), msgspec.structs.replace(good, item=path)):
        with pytest.raises(IntegrityError, match="leads outside"):
            table.decode_segment(table.encode_segment([row]))
        with pytest.raises(IntegrityError, match="leads outside"):
            table.decode_row(table.encode_row(row))


@pytest.mark.parametrize(
    "field", [{"offset": -1}, {"stored_nbytes": -1}, {"nbytes": -(2**63)}, {"shape": (4, -1)}, {"index": (-1,)}]
)
def test_negative_sizes_are_refused(field: dict[str, Any]) -> None:
    row = msgspec.structs.replace(ROWS[0], **field)
    with pytest.raises(IntegrityError, match="negative"):
        table.decode_segment(table.encode_segment([row]))


@pytest.mark.parametrize("field", [{"encoding": "zip"}, {"codec": "pickle"}, {"digest": "sha256:00"}])
def test_what_this_release_does_not_know_is_refused(field: dict[str, Any]) -> None:
    row = msgspec.structs.replace(ROWS[0], **field)
    with pytest.raises(IntegrityError, match="does not know one of them"):
        table.decode_segment(table.encode_segment([row]))


# -- roots ----------------------------------------------------------------------------------------------------------------


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@settings(derandomize=True, deadline=None)
@given(
    structure=json, version=st.integers(0, layout.MAX_VERSION), run=st.none() | sizes, paths=st.lists(paths, max_size=3)
)
def test_roots_round_trip(structure: Any, version: int, run: int | None, paths: list[str]) -> None:
    """P29: and the same root is the same bytes, whatever the order of its maps."""
    items = [roots.Item("array", ItemSpec(p, "blocks", (1,)), {"b": 1, "a": [p]}) for p in paths]
    segments = [roots.Segment("table/00000.seg", "", len(items), 0, "")]
    fields = {"structure": structure, "version": version, "run": run, "items": items, "segments": segments}
    root = make_root(**fields, nblocks=len(items))
    data = roots.encode(root)
    assert roots.decode(data, where="here") == root
    assert roots.encode(roots.decode(data, where="here")) == data
    stone = roots.Tombstone(roots.FORMAT, 1, "n", version, run or 0)
    assert roots.decode(roots.encode(stone), where="here") == stone


def test_every_truncation_and_flipped_byte_of_a_root_is_refused(little_memory: None) -> None:
    for length in range(len(ROOT)):
        with pytest.raises(IntegrityError):
            roots.decode(ROOT[:length], where="here")
    for position in range(len(ROOT)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(ROOT)
            damaged[position] ^= flip
            with pytest.raises(IntegrityError, match="here"):
                roots.decode(bytes(damaged), where="here")


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_root(data: bytes) -> None:
    assert refused(lambda: roots.decode(data, where="here"))
    assert refused(lambda: roots.decode(sealed(data), where="here"))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(field=st.sampled_from(roots.Root.__struct_fields__), value=json)
def test_a_root_with_one_strange_field_is_a_root_or_refused(field: str, value: Any) -> None:
    if not refused(lambda: roots.decode(with_body(**{field: value}), where="here")):
        assert isinstance(roots.decode(with_body(**{field: value}), where="here"), roots.Root)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "unknown field": (with_body(more=1), "unknown field"),
    "unknown type": (with_body(type="other"), "not a root"),
    "newer format": (with_body(format_version=2), "install the release that wrote it, or a newer one"),
    "newer format with new fields": (with_body(format_version=2, more=[1]), "format version 2"),
    "other format": (with_body(format="zip"), "expected format 'veloc_dask', found 'zip'"),
    "attempt outside": (with_body(attempt="../../x"), "not an attempt"),
    "attempt too short": (with_body(attempt="a"), "not an attempt"),
    "negative version": (with_body(version=-1), "expected a version"),
    "large version": (with_body(version=10**8), "expected a version"),
    "huge version": (
        sealed(b'{"format":"veloc_dask","format_version":1,"version":' + b"9" * 6000 + b"}"),
        "not a root",
    ),
    "huge format version": (sealed(b'{"format":"veloc_dask","format_version":' + b"9" * 6000 + b"}"), "not a root"),
    "wrong number of blocks": (with_body(nblocks=4), "do not have 4 blocks"),
    "a million dimensions": (
        with_body(items=[{"kind": "array", "spec": {"path": "u", "form": "blocks", "grid": [2**62] * 1_000_000}}]),
        "does not know",
    ),
    "unknown form": (
        with_body(items=[{"kind": "array", "spec": {"path": "u", "form": "zip", "grid": [3, 1]}}]),
        "does not know",
    ),
    "negative run": (with_body(run=-1), "negative size"),
    "negative sizes": (with_body(nblocks=-1), "negative size"),
    "negative segment": (
        with_body(segments=[{"path": "t", "node": "", "nrows": 1, "nbytes": -1, "sha256": ""}]),
        "negative size",
    ),
    "negative grid": (
        with_body(items=[{"kind": "array", "spec": {"path": "u", "form": "blocks", "grid": [-1]}}]),
        "here: ",
    ),
    "segment outside": (
        with_body(segments=[{"path": "../x", "node": "", "nrows": 1, "nbytes": 1, "sha256": ""}]),
        "leads outside",
    ),
    "document outside": (with_body(documents={"/etc/passwd": ""}), "leads outside"),
    "item outside": (
        with_body(items=[{"kind": "array", "spec": {"path": "a/../../b", "form": "blocks", "grid": []}}]),
        "leads outside",
    ),
    "deep structure": (
        sealed(ROOT[8:].split(b',"sha256":')[0][:-1] + b',"z":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        "not a root",
    ),
    "deep envelope": (b"[" * 1_000_000, "not a root"),
    "no checksum": (b'{"body":{}}', "not a root"),
    "lone surrogate": (with_body(name="x").replace(b'"x"', b'"\\ud800"'), "here"),
    "two envelopes": (ROOT + ROOT, "not a root"),
    "nothing": (b"", "not a root"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_roots_are_refused(case: str, little_memory: None) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(IntegrityError, match=message):
        roots.decode(data, where="here")


def test_a_root_is_not_read_beyond_its_limit(tmp_path: Path) -> None:
    remote = PosixRemote(str(tmp_path))
    remote.open()
    (tmp_path / "n").mkdir(mode=0o700)
    path = tmp_path / "n" / layout.root_name(1)
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(IntegrityError, match="at most"):
        commit.read_root(remote, "n", 1)
    with pytest.raises(IntegrityError, match="at most"):
        roots.decode(bytes(roots.MAX_ROOT_NBYTES + 1), where="here")


@pytest.mark.parametrize("plant", ["link", "directory link", "pipe", "directory"])
def test_what_is_planted_in_the_tree_is_refused(tmp_path: Path, plant: str) -> None:
    """A link in place of a block, of a directory or of the root leads nowhere; a pipe blocks nobody."""
    remote = PosixRemote(str(tmp_path / "remote"))
    remote.open()
    root = versions.save(Node("", ()), remote, "n", 1, 1)
    attempt = tmp_path / "remote" / "n" / root.directory
    moved = tmp_path / "moved"
    victims = [attempt / "u" / "c" / "0", tmp_path / "remote" / "n" / layout.root_name(1)]
    if plant == "directory link":
        (attempt / "u").rename(moved)
        (attempt / "u").symlink_to(moved)
        victims = []
    for number, victim in enumerate(victims):
        victim.rename(f"{moved}{number}")
        if plant == "link":
            victim.symlink_to(f"{moved}{number}")
        elif plant == "pipe":
            os.mkfifo(victim)
        else:
            victim.mkdir()
    with pytest.raises(BlockLost, match=r"no readable copy.*expected (no link|a regular file)"):
        versions.read(remote, root)
    if victims:
        with pytest.raises(IntegrityError, match=r"expected (no link|a regular file)"):
            commit.read_root(remote, "n", 1)


@pytest.mark.parametrize("claim", [{"stored_nbytes": 2**62}, {"offset": 2**62}, {"offset": 2**63 - 1}])
def test_a_row_that_claims_too_much_allocates_nothing(
    tmp_path: Path, claim: dict[str, int], little_memory: None
) -> None:
    remote = PosixRemote(str(tmp_path))
    remote.open()
    root = versions.save(Node("", ()), remote, "n", 1, 1)
    data = remote.get(f"n/{root.directory}/{root.segments[0].path}").tobytes()
    row = msgspec.structs.replace(table.decode_segment(data)[0], **claim)
    with pytest.raises(BlockLost):
        reader.read_verified(row, [reader.remote_copy(remote, "n", root.directory, row)], what="block")


def test_names_in_other_scripts_are_no_versions() -> None:
    """`int` reads the digits of every script, and two names of one version would shadow each other."""
    for entry in ("v\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.json", "v0000000\u00b2.json", "v00000001\n.json"):
        assert layout.parse_root(entry) is None
        assert layout.parse_run(entry[1:]) is None
        assert layout.parse_attempt(entry.partition(".")[0] + "-" + A) is None
    assert layout.parse_root("v00000001.json") == 1


def test_a_damaged_copy_is_set_aside_and_the_next_one_used(tmp_path: Path) -> None:
    """P06."""
    node = open_node([TierConfig(str(tmp_path / "fast")), TierConfig(str(tmp_path / "slow"))])
    root = versions.write_local(node, "n", 1)
    row = versions.rows(node, root)[0]
    fast, slow = (Path(t.home) / "n" / root.directory / row.object for t in node.tiers)
    slow.parent.mkdir(parents=True)
    good = fast.read_bytes()
    slow.write_bytes(good)

    def read() -> bytes:
        return reader.read_verified(row, reader.local_copies(node, "n", root.directory, row), what="block").tobytes()

    for position in range(len(good)):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        fast.write_bytes(damaged)
        assert read() == good
        assert not fast.exists()
        assert (fast.parent / f".bad-{fast.name}").read_bytes() == damaged
    slow.write_bytes(good[:-1])
    with pytest.raises(BlockLost, match="slow"):
        read()
    with pytest.raises(BlockLost, match="it is on no tier"):
        read()
    node.close()
