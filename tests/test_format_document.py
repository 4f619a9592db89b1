"""``docs/format.md`` is enough to read a checkpoint: a reader written from it, its own program and its examples do so.

Nothing of veloc_dask reads anything here; the package writes, and in the one test of field names it is asked for them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pathlib
import pickle
import re
import struct
import types
import warnings
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import msgpack
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster

import veloc_dask as vd

DOCUMENT = (pathlib.Path(__file__).parents[1] / "docs" / "format.md").read_text(encoding="utf-8")


def fences(language: str) -> Iterator[tuple[str, str]]:
    """Title and content of the document's code blocks in a language."""
    yield from re.findall(rf"^```{language}\b *(.*)\n((?s:.*?))^```$", DOCUMENT, re.MULTILINE)


# -- a reader, written from the document ---------------------------------------------------------------------------------


def _table() -> list[int]:
    found = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return found


CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


class Refused(Exception):
    pass


def need(sound: bool, what: str) -> None:
    if not sound:
        raise Refused(what)


def fields(found: Any, names: str) -> Any:
    need(set(found) == set(names.split()), f"expected fields {names}, found {sorted(found)}")
    return found


def safe(path: str) -> str:
    parts = path.split("/")
    sound = all(p not in ("", ".", "..") and len(p) <= 255 and "\\" not in p and "\0" not in p for p in parts)
    need(sound and len(path) <= 1024, f"path {path!r}")
    return path


def unwrap(file: bytes) -> dict[str, Any]:
    """Section 2: the body of a root."""
    need(len(file) <= 64 << 20, "length")
    need(file[:8] == b'{"body":' and file[-77:-66] == b',"sha256":"' and file[-2:] == b'"}', "envelope")
    need(hashlib.sha256(file[8:-77]).hexdigest() == file[-66:-2].decode(), "sha256 of the root")
    body: dict[str, Any] = json.loads(file[8:-77])
    need(body["format"] == "veloc_dask" and body["format_version"] == 1, "format")
    assert canonical(body) == file[8:-77], "writers produce the canonical form"
    return body


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def parse_dtype(text: str) -> np.dtype[Any]:
    def node(found: Any) -> Any:
        return found if isinstance(found, str) else [(n, node(d), *map(tuple, shape)) for n, d, *shape in found]

    dtype = np.lib.format.descr_to_dtype(node(json.loads(text)))
    need(not dtype.hasobject, "object dtype")
    return dtype


def segment_rows(data: bytes) -> list[dict[str, Any]]:
    """Section 3."""
    need(len(data) <= 1 << 28 and data[:8] == b"VELOCTB1", "magic")
    table = fields(msgpack.unpackb(data[8:]), "nrows ints texts tuples")
    n = table["nrows"]
    columns: dict[str, list[Any]] = {}

    def numbers(raw: bytes, dtype: str, count: int) -> list[int]:
        need(len(raw) == count * np.dtype(dtype).itemsize, "length of a column")
        return np.frombuffer(raw, dtype).tolist() if count else []

    for name, raw in fields(table["ints"], "offset stored_nbytes nbytes crc32c").items():
        columns[name] = numbers(raw, "<u4" if name == "crc32c" else "<i8", n)
    for name, text in fields(table["texts"], "item object dtype order encoding codec digest").items():
        codes = numbers(fields(text, "values codes")["codes"], "<u4", n)
        need(all(code < len(text["values"]) for code in codes), "a code without a text")
        columns[name] = [text["values"][code] for code in codes]
        assert list(dict.fromkeys(columns[name])) == text["values"], "values are listed in the order of first use"
    for name, pair in fields(table["tuples"], "index shape").items():
        lengths = numbers(fields(pair, "lengths values")["lengths"], "u1", n)
        flat = numbers(pair["values"], "<i8", sum(lengths))
        columns[name] = []
        for length in lengths:
            columns[name].append(tuple(flat[:length]))
            flat = flat[length:]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        safe(row["object"])
        need(min(row["offset"], row["stored_nbytes"], row["nbytes"], *row["index"], *row["shape"]) >= 0, "negative")
        need(row["codec"] == "" and row["digest"] == "", "codec or digest")
    return rows


class Version:
    """A version of which all files lie below `home`. Reading opens pickles: the tests trust what they have written."""

    def __init__(self, root: dict[str, Any], home: pathlib.Path) -> None:
        fields(
            root,
            "type format format_version name version attempt run run_uuid created structure items segments documents "
            "nblocks nbytes",
        )
        need(root["type"] == "version" and home.name == f"v{root['version']:08d}-{root['attempt']}", "directory")
        need(home.parent.name == root["name"], "name")
        self.root, self.home = root, home
        self.rows: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
        for item in root["items"]:
            fields(item, "kind spec recipe view")
            spec = fields(item["spec"], "path form grid shape chunk dtype")
            need(spec["form"] in ("array", "blocks") and safe(spec["path"]) not in self.rows, "item")
            self.rows[spec["path"]] = {}
        for segment in root["segments"]:
            fields(segment, "path node nrows nbytes sha256")
            data = (home / safe(segment["path"])).read_bytes()
            need(len(data) == segment["nbytes"] and hashlib.sha256(data).hexdigest() == segment["sha256"], "segment")
            rows = segment_rows(data)
            need(len(rows) == segment["nrows"], "number of rows")
            for row in rows:
                need(row["item"] in self.rows and row["index"] not in self.rows[row["item"]], "unknown or double row")
                self.rows[row["item"]][row["index"]] = row
        for item in root["items"]:
            need(self.rows[item["spec"]["path"]].keys() == set(np.ndindex(*item["spec"]["grid"])), "a missing block")
        every = [row for rows in self.rows.values() for row in rows.values()]
        need(len(every) == root["nblocks"], "nblocks")
        assert sum(row["stored_nbytes"] for row in every) == root["nbytes"]

    def check_documents(self) -> None:
        for path, digest in self.root["documents"].items():
            data = (self.home / safe(path)).read_bytes()
            need(hashlib.sha256(data).hexdigest() == digest, path)
            assert canonical(json.loads(data)) == data

    def content(self, row: dict[str, Any]) -> bytes:
        """Sections 3, 4 and 7: the verified stored bytes of a block without their checksum."""
        file = (self.home / row["object"]).read_bytes()
        stored = file[row["offset"] : row["offset"] + row["stored_nbytes"]]
        need(len(stored) == row["stored_nbytes"] and len(stored) >= 4, "length of a block")
        need(int.from_bytes(stored[-4:], "little") == row["crc32c"] == crc32c(stored[:-4]), "checksum of a block")
        return stored[:-4]

    def payload(self, row: dict[str, Any]) -> bytes:
        content = self.content(row)
        if len(content) == row["nbytes"]:
            return content
        need(row["encoding"] != "array" and content[:8] == struct.pack("<II", 1, row["nbytes"]), "frame")
        need(len(content) == row["nbytes"] + 8, "frame")
        return content[8:]

    def block(self, row: dict[str, Any], spec: dict[str, Any]) -> Any:
        """Section 5."""
        encoding = row["encoding"]
        if encoding == "array":
            dtype = parse_dtype(row["dtype"])
            content = self.content(row)
            shape = row["shape"] if len(content) == row["nbytes"] else spec["chunk"]
            need(len(shape) == len(row["shape"]) and math.prod(shape) * dtype.itemsize == len(content), "padding")
            padded = np.frombuffer(content, dtype).reshape(shape)
            block = padded[tuple(slice(n) for n in row["shape"])]
            need(row["order"] == "C" and block.nbytes == row["nbytes"], "shape")
            return block
        payload = self.payload(row)
        if encoding in ("ndarray", "scalar"):
            dtype = parse_dtype(row["dtype"])
            need(math.prod(row["shape"]) * dtype.itemsize == len(payload), "shape")
            flat = np.frombuffer(payload, dtype) if payload else np.empty(0, dtype)
            array = flat.reshape(row["shape"], order=row["order"])
            return array[()] if encoding == "scalar" else array
        if encoding == "bytes":
            return np.bytes_(payload) if row["dtype"] == '"|S1"' else payload
        if encoding == "str":
            text = payload.decode("utf-8", "surrogatepass")
            return np.str_(text) if row["dtype"] == '"<U1"' else text
        if encoding == "arrow":
            return pa.ipc.open_stream(io.BytesIO(payload)).read_all()
        need(encoding == "pickle", f"encoding {encoding}")
        return unpickle(payload)

    def value(self, node: dict[str, Any] | None = None) -> Any:
        """The saved value; each item as the array of its blocks, a single block as itself."""
        node = self.root["structure"] if node is None else node
        kind = node["type"]
        if kind == "dict":
            return {self.value(k): self.value(v) for k, v in zip(node["keys"], node["values"], strict=True)}
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(self.value(v) for v in node["values"])
        if kind == "value":
            return node["value"]
        if kind == "int":
            return int(node["value"], 16)
        if kind == "float":
            return float.fromhex(node["value"])
        need(kind == "item" and 0 <= node["item"] < len(self.root["items"]), "structure")
        return self.item(node["item"])

    def item(self, number: int) -> Any:
        spec = self.root["items"][number]["spec"]
        blocks = np.full(spec["grid"], None, object)
        for index, row in self.rows[spec["path"]].items():
            blocks[index] = self.block(row, spec)
        return blocks if spec["grid"] else blocks[()]

    def number(self, key: Any) -> int:
        """The item that lies under a key of the saved dict."""
        structure = self.root["structure"]
        keys = [self.value(k) for k in structure["keys"]]
        return int(structure["values"][keys.index(key)]["item"])

    def kept(self, key: Any) -> list[dict[str, Any]]:
        """The rows of that item."""
        return list(self.rows[self.root["items"][self.number(key)]["spec"]["path"]].values())


def unpickle(container: bytes) -> Any:
    need(len(container) >= 24 and container[:8] == b"vd-pkl1\n", "container")
    n, s = struct.unpack_from("<QQ", container, 8)
    end = 24 + 16 * n + s
    need(end <= len(container), "container")
    buffers = []
    for offset, length in struct.iter_unpack("<QQ", container[24 : 24 + 16 * n]):
        need(end <= offset < end + 64 and offset + length <= len(container), "buffer")
        need(not any(container[end:offset]), "gap")
        end = offset + length
        buffers.append(bytearray(container[offset:end]))
    need(end == len(container), "container")
    return pickle.loads(container[24 + 16 * n : 24 + 16 * n + s], buffers=buffers)


def open_remote(remote: pathlib.Path, name: str, version: int) -> Version:
    root = unwrap((remote / name / f"v{version:08d}.json").read_bytes())
    need((root["name"], root["version"]) == (name, version), "not where it belongs")
    return Version(root, remote / name / f"v{version:08d}-{root['attempt']}")


# -- what a real cluster has saved ---------------------------------------------------------------------------------------


STRUCT = np.dtype([("a", "<i4"), ("b", "<f8"), ("c", "S3")])
GAP = np.dtype({"names": ["a", "b"], "formats": ["<i2", ("<f8", (2,))], "offsets": [0, 8]})

FRAME = pd.DataFrame(
    {
        "i": np.arange(11),
        "x": [math.nan, *range(1, 11)],
        "s": [None, *"abcdefghij"],
        "c": pd.Categorical(list("abcdefabcde")),
        "t": pd.date_range("2024-01-01", periods=11, tz="Europe/Paris"),
    },
    index=pd.Index(np.arange(11) * 2, name="k"),
)

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "regular": np.arange(90, dtype="<f8").reshape(10, 9),
    "big endian": np.arange(90, dtype=">i4").reshape(10, 9),
    "irregular": np.arange(81, dtype=">f4").reshape(9, 9),
    "fortran": np.arange(80.0).reshape(8, 10),
    "empty chunk": np.arange(5, dtype="u1"),
    "struct": np.array([(i, i / 2, str(i)) for i in range(7)], STRUCT),
    "gap": np.array([(i, (i, -i)) for i in range(4)], GAP),
    "dates": np.array(["2024-01-01", "NaT", "2024-03-01"], "M8[s]"),
    "0-d": np.array(2.5),
    "objects": np.array([None, "x", {1: 2}], object),
}
CHUNKS: dict[str, Any] = {
    "regular": (4, 3),
    "big endian": (5, 5),
    "irregular": ((3, 2, 4), 9),
    "fortran": ((4, 1, 3), (5, 5)),
    "empty chunk": ((2, 0, 3),),
    "struct": 2,
    "gap": 2,
    "dates": 2,
    "0-d": (),
    "objects": 2,
}
PLAIN: dict[Any, Any] = {
    "bytes": b"\0raw",
    "str": "\ud800 lone",
    "numpy bytes": np.bytes_(b"ab\0"),
    "scalar": np.float32(1.25),
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "out of band": types.SimpleNamespace(array=np.arange(3000.0), small=np.arange(3), matrix=np.ones((40, 50))),
    "set": {1, "two"},
    "nested": {
        "float": 0.1,
        "floats": [math.inf, -0.0, 5e-324],
        ("a", (1, None)): (True, [2**53, -(2**200), 2**53 - 1]),
        1.5: {"é\x7f\u2028\n": '"\\\x01'},
        "none": (),
    },
}


def dask_value() -> dict[Any, Any]:
    value: dict[Any, Any] = {k: da.from_array(v, chunks=CHUNKS[k]) for k, v in ARRAYS.items()}
    for key in ("big endian", "irregular"):  # numpy's pickle, through which the graph goes, has lost the byte order
        value[key] = value[key].map_blocks(np.ndarray.astype, ARRAYS[key].dtype, dtype=ARRAYS[key].dtype)
    value["fortran"] = value["fortran"].map_blocks(np.asfortranarray, meta=np.empty((0, 0)))
    x = da.arange(100, chunks=10)
    value["unknown"] = x[x % 7 == 0]
    value["lies"] = x.map_blocks(lambda b: b.astype("f4"), dtype="i8", meta=np.empty(0, "i8"))
    ddf = dd.from_pandas(FRAME, npartitions=3)
    value |= {"frame": ddf, "series": ddf["x"], "delayed": dask.delayed(sorted)([3, 1, 2]), "same": value["regular"]}
    return value | {"sub": {"dir": [da.ones(3, chunks=2)]}} | PLAIN


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", memory_limit="2GiB"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def store(client: Client, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with ``remote/all/v00000001.json``, and the same as ``local/veloc-…/…/alone`` without a remote tier."""
    base = tmp_path_factory.mktemp("format")
    remote = vd.Checkpointer(client, "all", local=str(base / "fast"), remote=str(base / "remote"))
    remote.save(dask_value()).wait("durable", timeout=60)
    remote.close()
    local = vd.Checkpointer(client, "alone", local=str(base / "local"))
    local.save(dask_value()).wait("local", timeout=60)
    local.close()
    return base


def local_home(store: pathlib.Path, tier: str, name: str) -> pathlib.Path:
    """The directory of the only version on the only node's only tier."""
    (home,) = (store / tier).glob(f"veloc-*/*/{name}/v00000001-*/")
    return home


@pytest.fixture(params=["remote", "local copy of a durable one", "local"])
def version(request: pytest.FixtureRequest, store: pathlib.Path) -> Version:
    if request.param == "remote":
        return open_remote(store / "remote", "all", 1)
    home = local_home(store, "local", "alone") if request.param == "local" else local_home(store, "fast", "all")
    return Version(unwrap((home / "root.json").read_bytes()), home)


# -- the reader reads it -------------------------------------------------------------------------------------------------


def test_a_reader_written_from_the_document_gets_every_array(version: Version) -> None:
    found = version.value()
    for key, expected in ARRAYS.items():
        item = version.root["items"][version.number(key)]
        blocks = found[key]
        assert all(b.dtype == expected.dtype for b in np.atleast_1d(blocks).flat if isinstance(b, np.ndarray)), key
        if expected.ndim:
            np.testing.assert_array_equal(np.block(blocks.tolist()), expected)
        else:
            assert blocks == expected
        lengths = da.core.normalize_chunks(CHUNKS[key], expected.shape, dtype=expected.dtype)
        assert item["recipe"]["chunks"] == [list(dim) for dim in lengths]
        assert item["kind"] == "array"
        if item["spec"]["form"] == "array":
            shape, chunk = item["spec"]["shape"], item["spec"]["chunk"]
            assert shape == list(expected.shape)
            for index, row in version.rows[item["spec"]["path"]].items():
                block = expected[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))]
                assert row["shape"] == block.shape
    assert {version.kept(k)[0]["encoding"] for k in ARRAYS} == {"array", "ndarray", "pickle"}
    assert {version.root["items"][version.number(k)]["spec"]["form"] for k in ARRAYS} == {"array", "blocks"}
    assert "F" in {row["order"] for row in version.kept("fortran")}
    assert any(row["stored_nbytes"] > row["nbytes"] + 4 for row in version.kept("regular")), "nothing was padded"
    assert found["same"] is not None
    assert version.number("same") == version.number("regular")


def test_a_reader_written_from_the_document_gets_unknown_chunks_and_what_lied(version: Version) -> None:
    found = version.value()
    multiples = np.arange(0, 100, 7)
    np.testing.assert_array_equal(np.concatenate(found["unknown"].tolist()), multiples)
    assert version.root["items"][version.number("unknown")]["recipe"]["chunks"] == [[None] * 10]
    lies = version.root["items"][version.number("lies")]
    assert lies["spec"]["form"] == "array"
    assert not lies["view"]
    assert f"{lies['spec']['path']}/zarr.json" not in version.root["documents"]
    assert all(row["object"].split("/")[-2] == "x" for row in version.kept("lies"))
    np.testing.assert_array_equal(np.concatenate(found["lies"].tolist()), np.arange(100, dtype="f4"), strict=True)
    np.testing.assert_array_equal(np.concatenate(found["sub"]["dir"][0].tolist()), np.ones(3))


def test_a_reader_written_from_the_document_gets_frames(version: Version) -> None:
    found = version.value()
    assert {row["encoding"] for row in version.kept("frame")} == {"arrow"}
    frame = pd.concat([table.to_pandas() for table in found["frame"]])
    expected = FRAME.astype({"s": frame["s"].dtype})  # Dask makes texts Arrow's
    pd.testing.assert_frame_equal(frame, expected, check_categorical=False)
    for table in found["frame"]:
        about = json.loads(table.schema.metadata[b"veloc_dask"])
        fields(about, "kind index columns labels")
        assert about["kind"] == "frame"
        assert about["labels"]["values"] == list(FRAME.columns)
        assert about["columns"][:2] == [{"numpy": "<i8"}, {"numpy": "<f8"}]
        assert about["columns"][4] == {"unit": FRAME["t"].dt.unit, "tz": ["zone", "Europe/Paris"]}
        assert fields(about["columns"][3], "categories ordered")["ordered"] is False
        assert about["index"] == {"name": "k", "type": "Index", "dtype": {"numpy": "<i8"}}
        assert table.num_columns == len(FRAME.columns) + 1
    recipe = version.root["items"][version.number("frame")]["recipe"]
    assert [version.value(d) for d in recipe["divisions"]] == list(dd.from_pandas(FRAME, npartitions=3).divisions)
    meta = version.root["items"][recipe["meta"]]
    assert meta["kind"] == "meta"
    assert meta["spec"]["path"] == f"_meta/{recipe['meta']}"
    assert version.item(recipe["meta"]).num_rows == 0
    series = [table.to_pandas() for table in found["series"]]
    assert pd.concat(series)["x"].equals(FRAME["x"])


def test_a_reader_written_from_the_document_gets_plain_objects(version: Version) -> None:
    found = version.value()
    for key in ("bytes", "str", "numpy bytes", "scalar", "set", "nested"):
        assert found[key] == PLAIN[key]
        assert type(found[key]) is type(PLAIN[key])
    assert repr(found["nested"]) == repr(PLAIN["nested"])  # tells -0.0 from 0.0, and 1 from True
    assert [version.kept(k)[0]["encoding"] for k in ("bytes", "str", "scalar", "set")] == [
        "bytes",
        "str",
        "scalar",
        "pickle",
    ]
    assert found["masked"].tolist() == [1, None, 3]
    np.testing.assert_array_equal(found["out of band"].array, PLAIN["out of band"].array)
    np.testing.assert_array_equal(found["out of band"].matrix, PLAIN["out of band"].matrix)
    (row,) = version.kept("out of band")
    container = version.payload(row)
    assert struct.unpack_from("<Q", container, 8) == (1 + 1,), "both large arrays are out of band, the small one is not"
    where = (version.home / row["object"]).read_bytes().index(PLAIN["out of band"].array.tobytes())
    assert where % 64 == 0
    assert found["delayed"] == [1, 2, 3]


def test_bags_are_read(client: Client, tmp_path: pathlib.Path) -> None:
    ck = vd.Checkpointer(client, "bag", local=str(tmp_path / "fast"), remote=str(tmp_path / "remote"))
    ck.save(db.from_sequence(range(7), npartitions=3)).wait("durable", timeout=60)
    ck.save({"step": 5}).wait("durable", timeout=60)
    ck.close()
    version = open_remote(tmp_path / "remote", "bag", 1)
    assert [n for block in version.value() for n in block] == list(range(7))
    assert version.root["items"][0]["spec"]["path"] == "value"
    scalars = open_remote(tmp_path / "remote", "bag", 2)
    assert scalars.value() == {"step": 5}
    assert scalars.root["segments"] == scalars.root["items"] == []
    run = (tmp_path / "remote" / "bag" / "runs" / "00000001.json").read_bytes()
    assert run == canonical({"run_uuid": version.root["run_uuid"]})
    assert version.root["run"] == 1


def test_every_document_and_name_is_as_described(version: Version) -> None:
    version.check_documents()
    for item in version.root["items"]:
        spec = item["spec"]
        for index, row in version.rows[spec["path"]].items():
            inside = "/".join([spec["path"], "c", *map(str, index)])
            beside = f"{spec['path']}/x/{'.'.join(map(str, index)) or '0'}"
            assert row["object"] in (inside, beside)
            assert row["offset"] == 0
            assert (version.home / row["object"]).stat().st_size == row["stored_nbytes"]
        assert item["view"] == (f"{spec['path']}/zarr.json" in version.root["documents"])
    listed = {row["object"] for rows in version.rows.values() for row in rows.values()}
    listed |= set(version.root["documents"]) | {s["path"] for s in version.root["segments"]}
    files = {str(p.relative_to(version.home)) for p in version.home.rglob("*") if p.is_file()}
    assert {f for f in files - listed if f != "root.json" and not f.startswith(".owner-")} == set()
    assert listed <= files


def test_the_trees_differ_as_the_document_says(store: pathlib.Path) -> None:
    remote = open_remote(store / "remote", "all", 1)
    copy = local_home(store, "fast", "all")
    assert unwrap((copy / "root.json").read_bytes()) == remote.root | {"run": None} | {
        "created": unwrap((copy / "root.json").read_bytes())["created"]
    }
    assert not (copy.parent / "v00000001.json").exists()
    assert not (remote.home / "root.json").exists()
    alone = local_home(store, "local", "alone")
    assert (alone.parent / "v00000001.json").read_bytes() == (alone / "root.json").read_bytes()
    (marker,) = (store / "local").glob("veloc-*/node.json")
    assert fields(json.loads(marker.read_bytes()), "host node")["node"] == alone.parents[1].name


@pytest.mark.parametrize("what", ["root", "segment", "block", "document"])
def test_a_flipped_bit_is_refused(what: str, client: Client, tmp_path: pathlib.Path) -> None:
    ck = vd.Checkpointer(client, f"flip-{what}", local=str(tmp_path / "fast"), remote=str(tmp_path / "remote"))
    ck.save({"u": da.arange(5, chunks=5)}).wait("durable", timeout=60)
    ck.close()

    def read() -> None:
        version = open_remote(tmp_path / "remote", f"flip-{what}", 1)
        version.check_documents()
        version.value()

    read()
    home = open_remote(tmp_path / "remote", f"flip-{what}", 1).home
    path = {
        "root": home.with_name("v00000001.json"),
        "segment": home / "table" / "00000.seg",
        "block": home / "u" / "c" / "0",
        "document": home / "u" / "zarr.json",
    }[what]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Refused):
        read()


# -- the document's program, examples and lists --------------------------------------------------------------------------


def program() -> Any:
    (source,) = (content for _, content in fences("python"))
    assert "veloc_dask" not in source.replace('"veloc_dask"', "")
    space: dict[str, Any] = {}
    exec(compile(source, "docs/format.md", "exec"), space)
    return space["read_array"]


@pytest.mark.parametrize("key", [k for k in ARRAYS if k != "objects"] + ["unknown"])
def test_the_program_reads_a_real_version(key: str, store: pathlib.Path) -> None:
    version = open_remote(store / "remote", "all", 1)
    path = version.root["items"][version.number(key)]["spec"]["path"]
    expected = np.arange(0, 100, 7) if key == "unknown" else ARRAYS[key]
    found = program()(store / "remote", "all", 1, path)
    np.testing.assert_array_equal(found, expected)
    native = np.result_type(expected.dtype, expected.dtype)  # as np.block has it: native, and without gaps
    assert found.dtype == (expected.dtype if key == "0-d" else native)


@pytest.fixture
def example(tmp_path: pathlib.Path) -> pathlib.Path:
    """The worked example of the document as files."""
    jsons = dict(fences("json"))
    root = json.loads(jsons["v00000001.json"])
    base = tmp_path / "heat"
    home = base / f"v00000001-{root['body']['attempt']}"
    files = {base / "v00000001.json": canonical(root)}
    for path in root["body"]["documents"]:
        files[home / path] = canonical(json.loads(jsons[path]))
    for path, dump in fences("hexdump"):
        lines = dump.splitlines()
        assert [int(line[:4], 16) for line in lines] == list(range(0, 16 * len(lines), 16))
        parts = [bytes.fromhex(line[6:53]) for line in lines]
        texts = ["".join(chr(b) if 32 <= b < 127 else "." for b in part) for part in parts]
        assert [line[55:].ljust(len(text)) for line, text in zip(lines, texts, strict=True)] == texts
        files[home / path] = b"".join(parts)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


def test_the_worked_example_is_a_version(example: pathlib.Path) -> None:
    version = open_remote(example, "heat", 1)
    version.check_documents()
    found = version.value()
    np.testing.assert_array_equal(np.block(found.pop("u").tolist()), np.arange(10, dtype="<i2").reshape(2, 5))
    assert found == {"note": b"hello", "step": 17}
    np.testing.assert_array_equal(program()(example, "heat", 1, "u"), np.arange(10).reshape(2, 5))


def test_the_worked_example_is_what_the_package_writes(client: Client, example: pathlib.Path) -> None:
    ck = vd.Checkpointer(client, "heat", local=str(example / "fast"), remote=str(example / "remote"))
    u = da.from_array(np.arange(10, dtype="<i2").reshape(2, 5), chunks=(2, 3))
    ck.save({"u": u, "note": b"hello", "step": 17}).wait("durable", timeout=60)
    ck.close()
    written, shown = open_remote(example / "remote", "heat", 1), open_remote(example, "heat", 1)
    theirs = {"attempt", "created", "run_uuid", "segments"}  # of that save alone
    assert {k: v for k, v in written.root.items() if k not in theirs} == {
        k: v for k, v in shown.root.items() if k not in theirs
    }
    files = {p.relative_to(shown.home) for p in shown.home.rglob("*") if p.is_file()}
    assert files == {p.relative_to(written.home) for p in written.home.rglob("*") if p.is_file()}
    if len(written.root["segments"]) == 1:
        for path in files:
            assert (written.home / path).read_bytes() == (shown.home / path).read_bytes(), path


def test_the_examples_in_json_parse() -> None:
    jsons = {title: json.loads(content) for title, content in fences("json")}
    assert len(jsons) == DOCUMENT.count("```json"), "two examples have the same title"
    body = unwrap(canonical(jsons["tombstone"]))
    assert body["type"] == "tombstone"
    reader = Version.__new__(Version)
    reader.root = {"items": [None]}
    reader.item = lambda number: f"item {number}"  # type: ignore[method-assign]
    assert reader.value(jsons["structure"]) == {"u": "item 0", ("a", 1): [1.5, 2**70, None]}
    for dtype in jsons["dtypes"]:
        parse_dtype(json.dumps(dtype))


def listed(heading: str) -> list[str]:
    """The first column of the table below a heading."""
    section = DOCUMENT.split(f"\n### {heading}\n")[1].split("\n### ")[0].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_the_lists_of_fields_are_those_of_the_code() -> None:
    from veloc_dask.storage import blocks, root, table, zarr_view

    assert sorted(listed("Fields of a version root")) == sorted(["type", *root.Root.__struct_fields__])
    assert listed("Fields of an item") == list(root.Item.__struct_fields__)
    assert listed("Fields of a spec") == list(blocks.ItemSpec.__struct_fields__)
    assert listed("Fields of a segment") == list(root.Segment.__struct_fields__)
    assert sorted(listed("Fields of a tombstone")) == sorted(["type", *root.Tombstone.__struct_fields__])
    assert listed("Columns of a row") == list(table.Row.__struct_fields__)
    encodings = re.findall(r"^\| `(\w+)` \|", DOCUMENT.split("\n## 5. Payloads\n")[1].split("\n### ")[0], re.MULTILINE)
    assert set(encodings) == {"encoding", *table.ENCODINGS}
    for title, content in fences("json"):
        if title == "dtypes":
            for dtype in json.loads(content):
                text = json.dumps(dtype, separators=(",", ":"))
                assert zarr_view.dtype_text(zarr_view.dtype_from_text(text)) == text
        if title == "tombstone":
            assert isinstance(root.decode(canonical(json.loads(content)), where=title), root.Tombstone)


# -- zarr reads it, too --------------------------------------------------------------------------------------------------


@pytest.fixture
def group(version: Version) -> Iterator[Any]:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed: pip install veloc-dask[zarr]")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification.*")
        yield zarr.open_group(version.home, mode="r")


def test_zarr_opens_the_directory(version: Version, group: Any) -> None:
    name = version.root["name"]
    assert dict(group.attrs) == {"veloc_dask": {"name": name, "version": 1}}
    forms = set()
    for item in version.root["items"]:
        spec = item["spec"]
        if not item["view"]:
            continue
        array = group[spec["path"]]
        forms.add(spec["form"])
        rows = version.rows[spec["path"]]
        if spec["form"] == "blocks":
            assert array.shape == tuple(spec["grid"])
            for index, row in rows.items():
                elements = array[...]
                if spec["grid"]:
                    assert elements[index] == version.payload(row)
                else:  # which zarr 3.1 makes a bytes scalar of numpy
                    element = np.asarray(elements)
                    element = element.tobytes() if element.dtype.kind == "S" else element.item()
                    assert element == version.payload(row)
        else:
            assert array.shape == tuple(spec["shape"])
            assert array.chunks == tuple(spec["chunk"])
    assert forms == {"array", "blocks"}
    for key, expected in ARRAYS.items():
        spec = version.root["items"][version.number(key)]["spec"]
        if spec["form"] == "array":
            found = np.asarray(group[spec["path"]][...])
            np.testing.assert_array_equal(found, expected)
            assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")


@pytest.mark.parametrize("key", ["regular", "irregular"])
def test_zarr_finds_a_flipped_bit(key: str, version: Version, group: Any) -> None:
    spec = version.root["items"][version.number(key)]["spec"]
    assert spec["form"] == ("array" if key == "regular" else "blocks")
    path = version.home / version.kept(key)[0]["object"]
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[20] ^= 4
    path.write_bytes(damaged)
    try:
        with pytest.raises(Exception, match=r"(?i)checksum|crc32c"):
            group[spec["path"]][...]
    finally:
        path.write_bytes(good)
