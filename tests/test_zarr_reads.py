"""zarr-python opens what we store, with no knowledge of us, and finds damage."""

from __future__ import annotations

import itertools
import json
import pathlib
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from veloc_dask.storage.blocks import ItemSpec, array_item, dtype_text, encode
from veloc_dask.storage.zarr_view import array_json, group_json, zarr_dtype

zarr = pytest.importorskip("zarr")


@pytest.fixture(autouse=True)
def _unstable_types() -> Iterator[None]:
    """zarr warns that S, V and structured types may change in the specification; we write what it reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification.*")
        yield


def write(root: pathlib.Path, item: ItemSpec, chunks: Any, value: Any) -> None:
    """A version's group with one array item, assembled by hand as a commit does."""
    (root / "zarr.json").write_bytes(group_json({"title": "test"}))
    directory = root / item.path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "zarr.json").write_bytes(array_json(item, attributes={"units": "m"}))
    starts = [list(itertools.accumulate(sizes, initial=0)) for sizes in chunks]
    for index in np.ndindex(*item.grid):
        at = tuple(slice(s[i], s[i + 1]) for s, i in zip(starts, index, strict=True))
        encoded = encode(value[(..., *at)], item, index, allow_pickle=False)
        write_block(root, encoded)


def write_block(root: pathlib.Path, encoded: Any) -> pathlib.Path:
    data = b"".join(encoded.buffers())
    path = root / encoded.object
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data + crc32c(data).to_bytes(4, "little"))
    assert path.stat().st_size == encoded.stored_nbytes
    return path


def sample(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Values of every kind, none of them the fill value by accident."""
    n = int(np.prod(shape))
    if dtype.names:
        array = np.zeros(n, dtype)
        for name in dtype.names:
            array[name] = sample(dtype[name], (n,))
        return array.reshape(shape)
    if dtype.kind == "U":
        return np.array([f"é{i}" for i in range(n)], dtype).reshape(shape)
    if dtype.kind == "V":
        raw = np.random.default_rng(3).integers(0, 256, n * dtype.itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(shape)
    if dtype.kind == "b":
        return (np.arange(n) % 2 == 0).reshape(shape)
    array = (np.arange(n) + 1).astype(dtype)
    if dtype.kind in "fc":
        array[:2] = np.nan, -np.inf
    if dtype.kind in "mM":
        array[:1] = "NaT"
    return array.reshape(shape)


DTYPES = [np.dtype(d) for d in ["?", "i1", "u1", "S5", "V3", "V8"]]
DTYPES += [np.dtype(order + d) for order in "<>" for d in ["i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8"]]
DTYPES += [np.dtype(order + d) for order in "<>" for d in ["c8", "c16", "U5", "M8[ns]", "M8[7h]", "m8[s]", "M8[D]"]]
DTYPES += [np.dtype(d) for d in ["M8[Y]", "M8[M]", "M8[us]", "m8[as]"]]
STRUCTURED = [
    np.dtype([("a", "<i4"), ("b", "<f8")]),
    np.dtype([("x", "?"), ("y", "<U3"), ("z", "<M8[ns]"), ("w", "S2"), ("v", "<f2")]),
    np.dtype([("a", "u1"), ("b", [("c", "<c8"), ("d", "i1")])]),
    np.dtype([("a", "u1"), ("b", "S3"), ("c", "V2")]),
    np.dtype([("é", "<i8"), ("b c", "<m8[7h]")]),
]


@pytest.mark.parametrize("dtype", DTYPES + STRUCTURED, ids=str)
def test_every_dtype_with_edge_chunks(dtype: np.dtype, tmp_path: pathlib.Path) -> None:
    chunks = ((4, 4, 3), (5, 5, 5, 4))
    value = sample(dtype, (11, 19))
    item = array_item("state/u", chunks, dtype)
    assert item.form == "array"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "zarr.json").write_bytes(group_json())
    write(tmp_path, item, chunks, value)
    group = zarr.open_group(tmp_path, mode="r")
    array = group["state/u"]
    assert array.shape == (11, 19)
    assert array.chunks == (4, 5)
    assert dict(array.attrs) == {"units": "m"}
    found = array[...]
    native = dtype.newbyteorder("=")
    assert found.dtype.newbyteorder("=") == native
    assert found.astype(native).tobytes() == value.astype(native).tobytes()


@pytest.mark.parametrize("dtype", ["<f8", ">i4", "?", "<U3", "<M8[ns]"])
def test_0d(dtype: str, tmp_path: pathlib.Path) -> None:
    value = sample(np.dtype(dtype), (3,))[2:].reshape(())
    write(tmp_path, array_item("u", (), dtype), (), value)
    assert zarr.open_group(tmp_path, mode="r")["u"][()] == value


def test_a_missing_chunk_reads_as_fill_value(tmp_path: pathlib.Path) -> None:
    for n, dtype in enumerate(DTYPES + STRUCTURED):
        item = array_item(f"u{n}", ((2,),), dtype)
        directory = tmp_path / item.path
        directory.mkdir()
        (directory / "zarr.json").write_bytes(array_json(item))
        found = zarr.open_array(directory, mode="r")[...]
        expected = np.full(2, "NaT", dtype) if dtype.kind in "mM" else np.zeros(2, dtype)
        assert found.tobytes() == expected.astype(found.dtype).tobytes()


def test_layouts_and_one_dimension(tmp_path: pathlib.Path) -> None:
    base = np.arange(120.0).reshape(10, 12)
    for name, value in {"f": np.asfortranarray(base), "strided": np.repeat(base, 2, axis=1)[:, ::2]}.items():
        write(tmp_path, array_item(name, ((4, 4, 2), (12,)), "f8"), ((4, 4, 2), (12,)), value)
    line = np.arange(10)
    write(tmp_path, array_item("line", ((3, 3, 3, 1),), line.dtype), ((3, 3, 3, 1),), line)
    group = zarr.open_group(tmp_path, mode="r")
    np.testing.assert_array_equal(group["f"][...], base)
    np.testing.assert_array_equal(group["strided"][...], base)
    np.testing.assert_array_equal(group["line"][...], line)
    assert sorted(name for name, _ in group.members()) == ["f", "line", "strided"]


def test_zarr_finds_a_flipped_bit(tmp_path: pathlib.Path) -> None:
    chunks = ((4, 3),)
    write(tmp_path, array_item("u", chunks, "f8"), chunks, np.arange(7.0))
    table = ItemSpec("t", "blocks", (2,))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "zarr.json").write_bytes(array_json(table))
    write_block(tmp_path, encode(b"payload", table, (1,), allow_pickle=False))
    group = zarr.open_group(tmp_path, mode="r")
    for path, read in [("u/c/0", lambda: group["u"][...]), ("t/c/1", lambda: group["t"][...])]:
        read()
        data = bytearray((tmp_path / path).read_bytes())
        data[9] ^= 4
        (tmp_path / path).write_bytes(data)
        with pytest.raises(ValueError, match="checksum"):
            read()


@pytest.mark.parametrize("grid", [(), (3,), (2, 2), (1, 1, 2)], ids=str)
def test_blocks_form_gives_the_payloads(grid: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    item = ItemSpec("t", "blocks", grid)
    (tmp_path / "zarr.json").write_bytes(group_json())
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "zarr.json").write_bytes(array_json(item))
    payloads = {}
    for n, index in enumerate(np.ndindex(*grid)):
        value = [np.arange(3.0), {"a": n}, b"", "text"][n % 4]
        path = write_block(tmp_path, encode(value, item, index, allow_pickle=True))
        payloads[index] = path.read_bytes()[8:-4]
    array = zarr.open_group(tmp_path, mode="r")["t"]
    assert array.shape == grid
    found = array[...]
    for index, payload in payloads.items():
        element = found[index] if grid else np.asarray(found)[()]
        assert bytes(element) == payload


def test_a_block_beside_its_item_does_not_disturb_the_view(tmp_path: pathlib.Path) -> None:
    chunks = ((4, 4),)
    item = array_item("u", chunks, "f8")
    write(tmp_path, item, chunks, np.arange(8.0))
    write_block(tmp_path, encode(np.arange(4.0, dtype="f4"), item, (1,), allow_pickle=False))
    group = zarr.open_group(tmp_path, mode="r")
    np.testing.assert_array_equal(group["u"][...], np.arange(8.0))
    assert [name for name, _ in group.members(max_depth=None)] == ["u"]


def test_zarr_arrays_of_its_own_agree_with_our_document(tmp_path: pathlib.Path) -> None:
    """Where zarr-python can create the same array, it writes the same bytes into the same files."""
    for n, dtype in enumerate(d for d in DTYPES if d.str[0] != ">"):
        value = sample(dtype, (10,))
        name = f"theirs{n}"
        array = zarr.create_array(
            tmp_path, name=name, shape=(10,), chunks=(4,), dtype=dtype, compressors=[zarr.codecs.Crc32cCodec()]
        )
        array[...] = value
        item = array_item(f"ours{n}", ((4, 4, 2),), dtype)
        write(tmp_path, item, ((4, 4, 2),), value)
        theirs = json.loads((tmp_path / name / "zarr.json").read_bytes())
        ours = json.loads((tmp_path / item.path / "zarr.json").read_bytes())
        for key in ("chunk_grid", "chunk_key_encoding", "codecs", "data_type", "fill_value", "shape", "node_type"):
            assert ours[key] == theirs[key], (dtype, key)
        for i in range(2):
            assert (tmp_path / name / "c" / str(i)).read_bytes() == (tmp_path / item.path / "c" / str(i)).read_bytes()


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype("O"),
        np.dtype("g"),
        np.dtype("G"),
        np.dtype("M8"),
        np.dtypes.StringDType(),
        np.dtype("U0"),
        np.dtype("S0"),
        np.dtype([("a", ">i4")]),
        np.dtype([("a", "<i4", (2,))]),
        np.dtype([("a", "g")]),
        np.dtype([("a", "i1"), ("b", "i8")], align=True),
        np.dtype({"names": ["a", "b"], "formats": ["u1", "u4"], "offsets": [3, 8]}),
        np.dtype({"names": ["a", "b"], "formats": ["u1", "u4"], "offsets": [4, 0]}),
        np.dtype([(("title", "a"), "<i4")]),
        np.dtype("f8", metadata={"a": 1}),
        np.dtype((np.record, [("a", "<i4")])),
    ],
    ids=str,
)
def test_what_zarr_does_not_have(dtype: np.dtype) -> None:
    assert zarr_dtype(dtype) is None
    assert array_item("u", ((4,),), dtype).form == "blocks"


def test_documents_are_deterministic() -> None:
    item = array_item("u", ((4, 2), (3,)), "f8")
    one = array_json(item, dimension_names=["x", None], attributes={"b": np.float64("nan"), "a": np.arange(2)})
    two = array_json(item, dimension_names=("x", None), attributes={"a": [0, 1], "b": "NaN"})
    assert one == two
    assert json.loads(one)["dimension_names"] == ["x", None]
    assert group_json() == b'{"attributes":{},"node_type":"group","zarr_format":3}'
    with pytest.raises(ValueError, match="dimension"):
        array_json(item, dimension_names=["x"])
    with pytest.raises(ValueError, match="blocks"):
        array_json(ItemSpec("u", "array", (1,), (4,), (4,), dtype_text(np.dtype("g")) or ""))


def test_the_frame_of_an_element() -> None:
    data = b"".join(encode(b"abc", ItemSpec("t", "blocks", (1,)), (0,), allow_pickle=False).buffers())
    assert data == struct.pack("<II", 1, 3) + b"abc"
