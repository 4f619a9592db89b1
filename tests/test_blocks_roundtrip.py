"""What is encoded comes back exactly: type, dtype, byte order, shape, values, writable."""

from __future__ import annotations

import datetime
import math
import pickle
import zoneinfo
from typing import Any, ClassVar

import hypothesis.extra.numpy as hnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from veloc_dask.storage import blocks, frames, pickles
from veloc_dask.storage.blocks import ItemSpec, array_item, decode, dtype_from_text, dtype_text, encode
from veloc_dask.storage.errors import IntegrityError, NotSupported

ARRAYS = settings(max_examples=500, deadline=None, print_blob=True, report_multiple_bugs=False)
FRAMES = settings(max_examples=500, deadline=None, print_blob=True, report_multiple_bugs=False)

SINGLE = ItemSpec("t", "blocks", ())


def stored_bytes(encoded: blocks.Encoded) -> np.ndarray:
    """The file as a worker writes it, read back as a reader does."""
    data = b"".join(encoded.buffers())
    assert data == b"".join(encoded.buffers()), "a retry must see the same bytes"
    data += crc32c(data).to_bytes(4, "little")
    assert len(data) == encoded.stored_nbytes
    return np.frombuffer(data, np.uint8).copy()


def read(encoded: blocks.Encoded, stored: Any, item: ItemSpec | None, allow_pickle: bool = True) -> Any:
    return decode(
        stored,
        object=encoded.object,
        encoding=encoded.encoding,
        dtype=encoded.dtype,
        shape=encoded.shape,
        order=encoded.order,
        nbytes=encoded.nbytes,
        stored_nbytes=encoded.stored_nbytes,
        crc32c=int.from_bytes(bytes(stored[-4:]), "little"),
        item=item,
        allow_pickle=allow_pickle,
    )


def there_and_back(value: Any, item: ItemSpec = SINGLE, index: tuple[int, ...] = (), allow_pickle: bool = True) -> Any:
    encoded = encode(value, item, index, allow_pickle=allow_pickle)
    return read(encoded, stored_bytes(encoded), item, allow_pickle)


def assert_same_array(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    assert a.dtype.str == b.dtype.str
    assert a.dtype.type is b.dtype.type
    assert a.dtype.metadata == b.dtype.metadata
    assert a.dtype.isalignedstruct == b.dtype.isalignedstruct
    assert a.shape == b.shape
    if isinstance(a, np.ma.MaskedArray):
        np.testing.assert_array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
        np.testing.assert_array_equal(a.filled(), b.filled())
    elif a.dtype == object:
        assert [(type(x), repr(x)) for x in a.flat] == [(type(x), repr(x)) for x in b.flat]  # a NaN differs from itself
    elif a.dtype.hasobject or a.dtype.kind in "gG" or a.dtype.names or a.dtype.kind == "T":
        np.testing.assert_array_equal(a, b)  # tobytes shows pointers, or bytes of no meaning
    else:
        assert a.tobytes() == b.tobytes()


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(endianness="?", min_len=1, max_len=9),
    hnp.unicode_string_dtypes(endianness="?", min_len=1, max_len=5),
    st.sampled_from(
        [
            np.dtype("g"),
            np.dtype("G"),
            np.dtype("V7"),
            np.dtype([("a", "<i4"), ("b", ">f8")]),
            np.dtype([("a", "i1"), ("b", "f8", (2, 3)), ("c", [("d", "U2")])]),
            np.dtype([("a", "i1"), ("b", "f8")], align=True),
            np.dtype({"names": ["a", "b"], "formats": ["u1", "u4"], "offsets": [3, 8], "itemsize": 16}),
            np.dtype("M8[7h]"),
            np.dtype("f8", metadata={"unit": "m"}),
        ]
    ),
)


@st.composite
def arrays(draw: st.DrawFn, dtypes: st.SearchStrategy[Any] = DTYPES) -> np.ndarray:
    """Plain arrays of every dtype and layout; bytes are random, so NaN payloads and NaT occur."""
    dtype = draw(dtypes)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6))
    if dtype.kind == "b":
        array = draw(hnp.arrays(dtype, shape))
    elif dtype.kind in "U" or dtype.names or dtype.char in "gG":
        array = np.zeros(shape, dtype)
        if dtype.kind == "U":
            array[...] = draw(st.text("ab\0é\U0001f600", max_size=4))
        elif dtype.names:
            array["a"] = draw(st.integers(0, 100))
        else:
            with np.errstate(all="ignore"):
                array[...] = draw(st.floats()) / dtype.type(3)
    else:
        size = math.prod(shape) * dtype.itemsize
        seed = draw(st.integers(0, 2**32 - 1))
        raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        array = raw.view(dtype).reshape(shape) if size else np.empty(shape, dtype)
        if dtype.kind in "mM" and array.size and draw(st.booleans()):
            array[...] = "NaT"
    layout = draw(st.sampled_from(["C", "F", "strided", "reversed", "broadcast", "readonly"]))
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "broadcast":
        array = np.broadcast_to(array, (3, *array.shape))
    elif layout == "readonly":
        array.flags.writeable = False
    return array.view(np.ndarray) if array.dtype == dtype else array.astype(dtype)


@given(arrays())
@ARRAYS
def test_any_plain_array_in_blocks_form(array: np.ndarray) -> None:
    encoded = encode(array, ItemSpec("t", "blocks", (2, 1)), (1, 0), allow_pickle=True)
    assert encoded.object == "t/c/1/0"
    back = read(encoded, stored_bytes(encoded), None)
    assert_same_array(array, back)
    if encoded.encoding == "ndarray":
        assert back.flags.writeable
        assert back.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
        assert back.flags.c_contiguous == array.flags.c_contiguous or not array.flags.forc
        assert encoded.nbytes == array.nbytes
    else:
        assert dtype_text(array.dtype) is None


@given(arrays(), st.data())
@ARRAYS
def test_any_plain_array_in_chunks(array: np.ndarray, data: st.DataObject) -> None:
    chunk = tuple(data.draw(st.integers(1, max(1, n))) for n in array.shape)
    chunks = tuple(
        tuple(min(c, n - at) for at in range(0, n, c)) or (0,) for n, c in zip(array.shape, chunk, strict=True)
    )
    item = array_item("u", chunks, array.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SLAB_BYTES", data.draw(st.sampled_from([1, 40, 4 << 20])))
        patch.setattr(blocks, "_TILE", data.draw(st.sampled_from([1, 2, 64])))
        for index in np.ndindex(*item.grid):
            at = [sum(sizes[:i]) for sizes, i in zip(chunks, index, strict=True)]
            part = array[(..., *(slice(a, a + s[i]) for a, s, i in zip(at, chunks, index, strict=True)))]
            encoded = encode(part, item, index, allow_pickle=True)
            assert encoded.object == "/".join(["u", "c", *map(str, index)])
            assert (encoded.encoding == "array") == (item.form == "array")
            assert encoded.nbytes == part.nbytes or encoded.encoding == "pickle"
            stored = stored_bytes(encoded)
            back = read(encoded, stored, item)
            assert_same_array(part, back)
            assert back.flags.writeable or encoded.encoding == "pickle"


@given(arrays(st.sampled_from([np.dtype(d) for d in ["f8", ">i2", "M8[s]", "U3", "?"]])), st.data())
@ARRAYS
def test_masked_and_object_arrays(array: np.ndarray, data: st.DataObject) -> None:
    mask = np.random.default_rng(data.draw(st.integers(0, 9))).random(array.shape) < 0.5
    masked = np.ma.masked_array(array, mask=data.draw(st.sampled_from([np.ma.nomask, mask])))
    if data.draw(st.booleans()):
        masked.harden_mask()
    objects = array.astype(object, order="K")
    with np.errstate(invalid="ignore"):  # signaling NaN
        texts = array.astype(np.dtypes.StringDType())
    for value in (masked, objects, texts):
        back = there_and_back(value)
        assert_same_array(value, back)
        if value is masked:
            assert value.hardmask == back.hardmask
            assert (value.mask is np.ma.nomask) == (back.mask is np.ma.nomask)
            assert value.fill_value == back.fill_value or value.dtype.kind == "M"
            assert value.data.tobytes() == back.data.tobytes()  # what lies under the mask too


def test_a_large_text_is_not_mistaken_for_a_class() -> None:
    value = ["__main__" * 200_000, b"__main__" * 200_000, "__main__"]
    assert there_and_back(value) == value


MISFITS: list[Any] = [
    np.arange(4.0, dtype=">f8"),
    np.arange(4.0, dtype="f4"),
    np.arange(5.0),
    np.zeros((2, 2)),
    np.ma.masked_array(np.arange(4.0), mask=[0, 1, 0, 1]),
    np.array([1, "a", None, 2.5], dtype=object),
    np.arange(4.0).view(np.recarray),
    np.arange(4).view(np.memmap),
    np.float64(3),
    [1.0, 2.0, 3.0, 4.0],
    pd.Series(np.arange(4.0)),
    None,
    "four",
]


@pytest.mark.parametrize("value", MISFITS, ids=lambda v: type(v).__name__)
def test_what_does_not_fit_an_array_item_lies_beside_it(value: Any) -> None:
    item = array_item("u", ((4, 4),), "f8")
    encoded = encode(value, item, (1,), allow_pickle=True)
    assert encoded.object == "u/x/1"
    back = read(encoded, stored_bytes(encoded), item)
    assert type(back) is type(value)
    if isinstance(value, np.ndarray):
        assert_same_array(value, back)
    elif isinstance(value, pd.Series):
        pd.testing.assert_series_equal(value, back)
    else:
        assert back == value


SCALARS: list[Any] = [
    np.float64(np.nan),
    np.float32(1.5),
    np.int64(-3),
    np.uint8(255),
    np.bool_(True),
    np.complex128(1j),
    np.longdouble(1) / 3,
    np.datetime64("2020-01-01", "D"),
    np.datetime64("NaT", "ns"),
    np.timedelta64(5, "m"),
    np.str_("abc"),
    np.str_("abc\0"),
    np.str_(""),
    np.bytes_(b"a\0"),
    np.bytes_(b"ab"),
    np.array((1, 2.0), dtype=[("a", "i4"), ("b", "f8")])[()],
    np.longlong(4),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda v: repr(v))
def test_scalars_of_numpy_stay_scalars(value: Any) -> None:
    for item in (SINGLE, array_item("u", (), value.dtype)):
        back = there_and_back(value, item)
        assert type(back) is type(value) or (type(value) is np.longlong and type(pickle.loads(pickle.dumps(value))))
        assert back.dtype == value.dtype
        assert back == value or (back != back and value != value)


def test_a_0d_chunk() -> None:
    item = array_item("u", (), "f8")
    encoded = encode(np.array(3.5), item, (), allow_pickle=False)
    assert (encoded.object, encoded.encoding, encoded.stored_nbytes) == ("u/c", "array", 12)
    assert encode(np.float64(3.5), item, (), allow_pickle=False).object == "u/c"
    assert_same_array(np.array(3.5), read(encoded, stored_bytes(encoded), item))


OBJECTS: list[Any] = [
    None,
    1,
    2**100,
    1.5,
    "text",
    "\ud800 lone surrogate",
    "",
    b"bytes",
    b"",
    bytearray(b"ab"),
    {"a": [1, (2, 3)], "b": {4}},
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    list(range(10_000)),
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda v: repr(v)[:20])
def test_python_objects(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("value", ["text", "\ud800", b"bytes", b""])
def test_text_and_bytes_need_no_pickle(value: Any) -> None:
    assert there_and_back(value, allow_pickle=False) == value


def test_pickle_only_where_allowed() -> None:
    for value, name in [
        ({}, "builtins.dict"),
        (np.array([None]), "array of dtype object"),
        (pd.Series([1, "a"]), "pandas"),
    ]:
        with pytest.raises(NotSupported, match=name):
            encode(value, SINGLE, (), allow_pickle=False)
    encoded = encode({}, SINGLE, (), allow_pickle=True)
    with pytest.raises(NotSupported, match="allow_pickle"):
        read(encoded, stored_bytes(encoded), None, allow_pickle=False)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(24.0).reshape(4, 6)
    for value, item in [
        (array, array_item("u", ((4,), (6,)), "f8")),
        (array, ItemSpec("u", "blocks", (1, 1))),
        (array.T, ItemSpec("u", "blocks", (1, 1))),
    ]:
        views = [np.frombuffer(b, np.uint8) for b in encode(value, item, (0, 0), allow_pickle=False).buffers()]
        assert np.shares_memory(views[-1], array)
        assert views[-1].nbytes == array.nbytes
    encoded = encode(array, ItemSpec("u", "blocks", (1, 1)), (0, 0), allow_pickle=False)
    stored = stored_bytes(encoded)
    assert np.shares_memory(read(encoded, stored, None), stored)
    big = {"a": np.arange(10_000), "b": np.arange(9_000).reshape(90, 100).T}
    encoded = encode(big, SINGLE, (), allow_pickle=True)
    views = [np.frombuffer(b, np.uint8) for b in encoded.buffers()]
    assert any(np.shares_memory(v, big["a"]) for v in views)
    assert any(np.shares_memory(v, big["b"]) for v in views)
    stored = stored_bytes(encoded)
    back = read(encoded, stored, None)
    for key, value in back.items():
        assert np.shares_memory(value, stored)
        assert value.flags.writeable
        assert (value.__array_interface__["data"][0] - stored.__array_interface__["data"][0]) % 64 == 0
        assert_same_array(value, big[key])


def test_strided_arrays_in_pickles_keep_their_byte_order() -> None:
    value = np.arange(20_000, dtype=">i4")[::2]
    assert_same_array(value, there_and_back([value, value])[1])
    both = there_and_back([value, value])
    assert both[0] is both[1]


def test_masked_arrays_are_not_copied() -> None:
    value = np.ma.masked_array(np.arange(10_000.0), mask=np.arange(10_000) % 2, fill_value=7)
    encoded = encode(value, SINGLE, (), allow_pickle=True)
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), value.data) for b in encoded.buffers())
    stored = stored_bytes(encoded)
    back = read(encoded, stored, None)
    assert np.shares_memory(back.data, stored)
    assert back.fill_value == 7
    back[1] = 3
    assert back[1] == 3
    structured = np.ma.masked_array([(1, 2.0), (3, 4.0)], mask=[(0, 1), (1, 0)], dtype=[("a", "i4"), ("b", "f8")])
    assert repr(there_and_back(structured)) == repr(structured)
    assert there_and_back(np.ma.masked) is np.ma.masked


def test_arrays_in_pickles_keep_their_writability() -> None:
    frozen = np.arange(5000)
    frozen.flags.writeable = False
    back = there_and_back([frozen, np.arange(5000)])
    assert not back[0].flags.writeable
    assert back[1].flags.writeable


def test_copies_are_bounded() -> None:
    array = np.arange(3_000_000.0).reshape(1000, 3000)
    for value, item in [
        (array[:, ::2], ItemSpec("u", "blocks", (1, 1))),
        (array.T, array_item("u", ((3000,), (1000,)), "f8")),
        (array[:999], ItemSpec("u", "array", (1, 1), (999, 3000), (1000, 3000), dtype_text(array.dtype) or "")),
        (array[None, None], array_item("u", ((1,), (1,), (1000,), (3000,)), "f8")),
    ]:
        encoded = encode(value, item, (0,) * value.ndim, allow_pickle=False)
        if not value.flags.c_contiguous or encoded.stored_nbytes > value.nbytes + 12:
            assert max(memoryview(b).nbytes for b in encoded.buffers()) <= blocks.SLAB_BYTES
        assert_same_array(read(encoded, stored_bytes(encoded), item), np.ascontiguousarray(value))


@pytest.mark.parametrize("value", [np.arange(200.0), {"a": np.arange(2000)}, b"x" * 500, np.arange(200.0)[::2]])
def test_elements_above_the_limit_are_plain_files(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ELEMENT_LIMIT_BYTES", 256)
    encoded = encode(value, ItemSpec("t", "blocks", (2, 3)), (1, 2), allow_pickle=True)
    assert encoded.object == "t/x/1.2"
    assert encoded.stored_nbytes == encoded.nbytes + 4
    np.testing.assert_equal(read(encoded, stored_bytes(encoded), None), value)


def test_forms() -> None:
    nan = math.nan
    assert array_item("u", ((4, 4, 2), (3,)), "f8") == ItemSpec(
        "u", "array", (3, 1), (10, 3), (4, 3), dtype_text(np.dtype("f8")) or ""
    )
    for chunks, dtype in [
        (((4, 2, 4),), "f8"),
        (((2, 4),), "f8"),
        (((4, 0),), "f8"),
        (((0,),), "f8"),
        (((nan, nan),), "f8"),
        (((4,),), "O"),
        (((4,),), "g"),
        (((4,),), [("a", "f8", (2,))]),
        (((100, 1), (100, 1)), "f8"),
    ]:
        assert array_item("u", chunks, dtype) == ItemSpec("u", "blocks", tuple(map(len, chunks)))
    assert array_item("u", ((8, 2),), "f8").form == "blocks"
    assert array_item("u", ((8, 8, 4),), "f8").form == "array"  # 24 for 20: a fifth


def test_index_outside_the_grid() -> None:
    for index in [(2,), (-1,), (0, 0), ()]:
        with pytest.raises(ValueError, match="grid"):
            encode(1, ItemSpec("t", "blocks", (2,)), index, allow_pickle=True)


@pytest.mark.parametrize(
    "text",
    [
        '"|O"',
        "",
        "[]",
        "{}",
        "3",
        "null",
        '"f8"',
        '"nonsense"',
        '"<i4,<i4"',
        '[["a"]]',
        '[["a","|O"]]',
        '[["a","<i4",[-1]]]',
        '[["a","<i4",["b"]]]',
        '[["a","<i4"],["a","<i4"]]',
        '"<f8" ',
        "[" * 5000 + "]" * 5000,
        '[[["t","a"],"<i4"]]',
        '"<U0"',
        '"<M8[xx]"',
    ],
)
def test_dtype_texts_that_are_refused(text: str) -> None:
    with pytest.raises(IntegrityError):
        dtype_from_text(text)


@given(DTYPES)
@settings(max_examples=300, deadline=None, print_blob=True)
def test_dtype_texts(dtype: np.dtype) -> None:
    text = dtype_text(dtype)
    if text is not None:
        assert dtype_from_text(text) == dtype
    else:
        assert dtype.metadata or dtype.isalignedstruct


class FakeDeviceArray:
    __cuda_array_interface__: ClassVar[dict[str, Any]] = {"shape": (1,)}


def test_device_memory_is_refused() -> None:
    cupy = type("ndarray", (), {"__module__": "cupy"})
    numba = type("DeviceNDArray", (), {"__module__": "numba.cuda.cudadrv.devicearray"})
    tensor = type("Tensor", (), {"__module__": "torch", "__cuda_array_interface__": property(lambda self: {})})
    there = tensor()
    there.device = type("device", (), {"type": "cuda"})
    for value in [FakeDeviceArray(), cupy(), numba(), there, {"deep": [FakeDeviceArray()]}]:
        with pytest.raises(NotSupported, match="host memory"):
            encode(value, SINGLE, (), allow_pickle=True)
    here = tensor()
    here.device = type("device", (), {"type": "cpu"})
    pickles.refuse_device_memory(here)


def test_classes_of_a_script_travel_by_value() -> None:
    kind = type("Point", (), {"__module__": "__main__", "norm": lambda self: 7})
    back = there_and_back({"p": kind(), "f": lambda: 3})
    assert back["p"].norm() == 7
    assert back["f"]() == 3


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(NotSupported, match="generator"):
        encode((i for i in ()), SINGLE, (), allow_pickle=True)

    class Bad:
        def __reduce__(self) -> Any:
            raise RuntimeError("no way")

    with pytest.raises(NotSupported, match="no way"):
        encode(Bad(), SINGLE, (), allow_pickle=True)


# --- frames ---

ZONES = [zoneinfo.ZoneInfo("Europe/Paris"), zoneinfo.ZoneInfo("UTC"), datetime.UTC]
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)


def column(draw: st.DrawFn, n: int, kind: str) -> Any:
    """A pandas array of n rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    missing = rng.random(n) < 0.3
    if kind in ("f4", "f8", "i1", "i8", "u2", "u8"):
        return rng.integers(0, 256, n * np.dtype(kind).itemsize, dtype=np.uint8).view(kind)
    if kind == "bool":
        return rng.random(n) < 0.5
    if kind[:2] in ("M8", "m8"):
        data = rng.integers(-(2**40), 2**40, n).astype(kind)
        data[missing] = "NaT"
        return data
    if kind[:2] == "tz":
        data = pd.DatetimeIndex(rng.integers(0, 2**31, n).astype(f"M8[{kind[3:]}]")).tz_localize("UTC")
        return data.tz_convert(draw(st.sampled_from(ZONES))).where(~missing).array
    if kind in ("Int8", "UInt64", "Float32", "Float64"):
        return pd.array(np.where(missing, None, rng.integers(0, 100, n)), dtype=kind)
    if kind == "boolean":
        return pd.array(np.where(missing, None, rng.random(n) < 0.5), dtype=kind)
    if kind == "object":
        return np.array([None, 1, "a"], dtype=object)[rng.integers(0, 3, n)]
    words = np.array([draw(TEXT) for _ in range(min(n, 3))] + ["x"], dtype=object)
    values = np.where(missing, None, words[rng.integers(0, len(words), n)]) if n else np.array([], object)
    if kind == "category":
        if draw(st.booleans()):
            return pd.Categorical(values, ordered=draw(st.booleans()))
        return pd.Categorical(np.where(missing, np.nan, rng.integers(0, 5, n)), ordered=draw(st.booleans()))
    if kind == "arrow":
        which = draw(st.sampled_from([pa.int32(), pa.float64(), pa.timestamp("us", "UTC"), pa.date32(), pa.bool_()]))
        return pd.array(np.where(missing, None, rng.integers(0, 2, n)), dtype=pd.ArrowDtype(pa.int64())).astype(
            pd.ArrowDtype(which) if which not in (pa.date32(), pa.timestamp("us", "UTC")) else pd.ArrowDtype(pa.int64())
        )
    if kind == "arrow_string":
        return pd.array(values, dtype=pd.ArrowDtype(pa.string()))
    storage, na = kind.split("-")
    return pd.array(values, dtype=pd.StringDtype(storage, na_value=np.nan if na == "nan" else pd.NA))


KINDS = ["f4", "f8", "i1", "i8", "u2", "u8", "bool", "Int8", "UInt64", "Float32", "Float64", "boolean", "object"]
KINDS += [f"{k}[{u}]" for k in ("M8", "m8") for u in ("s", "ms", "us", "ns")] + ["tz-s", "tz-us", "tz-ns"]
KINDS += ["category", "arrow", "arrow_string", "pyarrow-nan", "pyarrow-NA", "python-nan", "python-NA"]


@st.composite
def indexes(draw: st.DrawFn, n: int) -> Any:
    name = draw(st.one_of(st.none(), TEXT, st.integers(0, 3), st.just(("a", 1))))
    kind = draw(st.sampled_from(["range", "multi", "freq", "period", "interval", *KINDS]))
    if kind == "range":
        step = draw(st.sampled_from([1, 2, -3]))
        start = draw(st.integers(-5, 5))
        return pd.RangeIndex(start, start + step * n, step, name=name)
    if kind == "multi":
        return pd.MultiIndex.from_arrays([np.arange(n), np.arange(n) % 2], names=[name, "b"])
    if kind == "freq":
        return pd.date_range("2020", periods=n, freq="h", name=name)
    if kind == "period":
        return pd.period_range("2020", periods=n, freq="D", name=name)
    if kind == "interval":
        return pd.interval_range(0, n, periods=n, name=name) if n else pd.IntervalIndex([], name=name)
    return pd.Index(column(draw, n, kind), name=name)


@st.composite
def pandas_values(draw: st.DrawFn) -> Any:
    n = draw(st.integers(0, 6))
    index = draw(indexes(n))
    what = draw(st.sampled_from(["frame", "frame", "frame", "series", "index"]))
    if what == "index":
        return index
    if what == "series":
        values = column(draw, n, draw(st.sampled_from(KINDS)))
        value: Any = pd.Series(values, index=index, name=draw(st.one_of(st.none(), TEXT, st.integers())))
    else:
        kinds = draw(st.lists(st.sampled_from(KINDS), max_size=4))
        value = pd.DataFrame({i: column(draw, n, kind) for i, kind in enumerate(kinds)}, index=index)
        labels = draw(
            st.sampled_from(["text", "text", "text", "odd", "range", "twice", "object", "multi", "python", "int"])
        )
        if labels == "text":
            value.columns = pd.Index([f"c{i}" for i in range(len(kinds))], name=draw(st.one_of(st.none(), TEXT)))
        elif labels == "odd":
            odd = ["", "__index_level_0__", "\0", "é\U0001f600", "index"]
            value.columns = pd.Index(odd[: len(kinds)], dtype="str")
        elif labels == "twice":
            value.columns = pd.Index(["a"] * len(kinds), dtype="str")
        elif labels == "object":
            value.columns = pd.Index([None, "b", 3, "d"][: len(kinds)], dtype=object)
        elif labels == "multi" and kinds:
            value.columns = pd.MultiIndex.from_arrays([["a"] * len(kinds), list(range(len(kinds)))])
        elif labels == "python":
            value.columns = pd.Index(list("abcd")[: len(kinds)], dtype=pd.StringDtype("python", na_value=np.nan))
        elif labels == "int":
            value.columns = pd.Index(range(5, 5 + len(kinds)), dtype="i8")
    if draw(st.integers(0, 9)) == 0:
        value.attrs = {"source": "test"}
    if draw(st.integers(0, 9)) == 0 and value.index.is_unique and getattr(value, "columns", value.index).is_unique:
        value.flags.allows_duplicate_labels = False
    return value


def assert_same_dtype(a: Any, b: Any) -> None:
    assert a == b
    assert type(a) is type(b)
    if isinstance(a, pd.DatetimeTZDtype):
        assert type(a.tz) is type(b.tz)
        assert str(a.tz) == str(b.tz)
        assert a.unit == b.unit
    if isinstance(a, pd.StringDtype):
        assert a.storage == b.storage
        assert (a.na_value is pd.NA) == (b.na_value is pd.NA)
    if isinstance(a, pd.CategoricalDtype):
        assert_same_index(a.categories, b.categories)
        assert a.ordered == b.ordered


def assert_same_values(a: Any, b: Any) -> None:
    assert_same_dtype(a.dtype, b.dtype)
    if isinstance(a.dtype, np.dtype) and a.dtype.kind != "O":
        assert a.to_numpy().tobytes() == b.to_numpy().tobytes()  # NaN payloads too
    elif isinstance(a.dtype, pd.CategoricalDtype):
        np.testing.assert_array_equal(a.array.codes, b.array.codes)
    elif isinstance(a.dtype, pd.MultiIndex | pd.IntervalDtype):
        assert a.equals(b)
    else:
        left, right = list(a.array), list(b.array)
        assert [type(x) for x in left] == [type(x) for x in right]
        assert all(x is y or x == y or (x != x and y != y) for x, y in zip(left, right, strict=True))


def assert_same_index(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    assert a.names == b.names
    assert [type(n) for n in a.names] == [type(n) for n in b.names]
    assert getattr(a, "freq", None) == getattr(b, "freq", None)
    if isinstance(a, pd.RangeIndex):
        assert (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    elif isinstance(a, pd.MultiIndex):
        pd.testing.assert_index_equal(a, b, exact=True)
    else:
        assert_same_values(a, b)


def assert_same_pandas(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, pd.Index):
        assert_same_index(a, b)
        return
    assert_same_index(a.index, b.index)
    assert a.attrs == b.attrs
    assert a.flags.allows_duplicate_labels == b.flags.allows_duplicate_labels
    if isinstance(a, pd.Series):
        assert a.name == b.name
        assert type(a.name) is type(b.name)
        assert_same_values(a, b)
        return
    assert_same_index(a.columns, b.columns)
    for i in range(a.shape[1]):
        assert_same_values(a.iloc[:, i], b.iloc[:, i])


@given(pandas_values())
@FRAMES
def test_any_pandas_value(value: Any) -> None:
    encoded = encode(value, ItemSpec("table", "blocks", (3,)), (2,), allow_pickle=True)
    assert encoded.object == "table/c/2"
    back = read(encoded, stored_bytes(encoded), None)
    assert_same_pandas(value, back)
    if isinstance(back, pd.DataFrame | pd.Series) and len(back):  # pandas may write into it
        for column in [back] if isinstance(back, pd.Series) else [back.iloc[:, i] for i in range(back.shape[1])]:
            column.iloc[0] = column.iloc[-1]
    if encoded.encoding == "arrow":
        assert_same_pandas(value, there_and_back(value, allow_pickle=False))
        plain = pa.ipc.open_stream(stored_bytes(encoded)[8:-4].tobytes()).read_all()
        assert plain.num_rows == (len(value) if plain.num_columns else 0)
        assert plain.validate(full=True) is None


def frame_of(**columns: Any) -> Any:
    return pd.DataFrame({name: pd.Series(values) for name, values in columns.items()})


EXACT: dict[str, Any] = {
    "numbers": frame_of(a=np.arange(3), b=np.arange(3.0), c=[True, False, True]),
    "text": frame_of(a=["x", None, "z"]),
    "empty": frame_of(a=np.arange(3.0), b=["x", "y", "z"]).iloc[:0],
    "no columns": pd.DataFrame(index=pd.RangeIndex(3)),
    "nothing": pd.DataFrame(),
    "zone": frame_of(t=pd.date_range("2020", periods=3, tz="Europe/Paris")),
    "utc": frame_of(t=pd.date_range("2020", periods=3, tz="UTC")),
    "category": frame_of(c=pd.Categorical(["a", "b", None], ["b", "a", "z"], ordered=True)),
    "time categories": frame_of(c=pd.Categorical(pd.to_datetime(["2020", "2021"]))),
    "index": pd.DataFrame({"a": [1.0, 2.0]}, index=pd.Index(["p", "q"], name="a")),
    "sliced": frame_of(a=["x", "yy", "z"], b=[1, 2, 3]).iloc[1:],
    "rows": pd.DataFrame(np.arange(6.0).reshape(3, 2), columns=["a", "b"]),
    "numbered": pd.DataFrame(np.arange(6.0).reshape(3, 2)),
    "series": pd.Series([1, None], dtype="Int64", name="s"),
    "range": pd.RangeIndex(2, 8, 3, name="r"),
    "masked nan": pd.DataFrame({"a": pd.array([0.0, None], dtype="Float64") / 0.0}),
}


@pytest.mark.parametrize("name", EXACT)
def test_ordinary_frames_are_arrow(name: str) -> None:
    value = EXACT[name]
    encoded = encode(value, SINGLE, (), allow_pickle=False)
    assert encoded.encoding == "arrow"
    assert_same_pandas(value, read(encoded, stored_bytes(encoded), None, allow_pickle=False))


def test_other_arrow_readers_get_the_same_frame() -> None:
    for name in ["numbers", "text", "zone", "category", "index", "sliced", "rows", "empty"]:
        stream = bytearray().join(frames.to_arrow(EXACT[name]))
        theirs = pa.ipc.open_stream(stream).read_all().to_pandas()
        pd.testing.assert_frame_equal(theirs, EXACT[name])


def test_numeric_columns_are_not_copied() -> None:
    frame = pd.DataFrame({"a": np.arange(10_000.0), "b": np.arange(10_000)})
    views = [np.frombuffer(piece, np.uint8) for piece in frames.to_arrow(frame)]
    for name in frame:
        assert any(np.shares_memory(view, frame[name].to_numpy()) for view in views)


class Table(pd.DataFrame):
    pass


def test_subclasses_and_the_rest_are_pickled() -> None:
    frame = pd.DataFrame({"a": [1, 2]})
    values = [Table(frame), frame.set_index(["a", frame.index]), frame.astype(object), frame.astype("Sparse[int]")]
    values += [frame.assign(a=pd.Series(["\ud800", "b"], dtype=pd.StringDtype("python")))]
    for value in values:
        encoded = encode(value, SINGLE, (), allow_pickle=True)
        assert encoded.encoding == "pickle"
        back = read(encoded, stored_bytes(encoded), None)
        assert type(back) is type(value)
        pd.testing.assert_frame_equal(back, value)
