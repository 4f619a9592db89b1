"""pandas frames, series and indexes as Arrow IPC streams, where the round trip is exact.

Owns the list of pandas types that Arrow gives back exactly, the conversion, and the proof. Anything else raises
`Inexact` with the reason, and the caller takes pickle. pandas and pyarrow are optional and imported only when a value
of pandas (or a stored stream) is at hand.

How: a value is described by a small JSON document (`_describe`): the kind, the index and the dtype of each column, all
from a closed list. It travels in the schema's metadata under ``veloc_dask`` and is all that the reader believes;
metadata for pandas are there as well, so that any Arrow reader gets a sensible frame. Before a description is used for
the first time, an empty slice goes through the whole path and must come back with the same description and dtypes.

Invariants: columns leave without a copy where Arrow has pandas' layout, with NaN payloads intact (nulls are only made
of NaT, NA and missing categories); results never refer to read-only memory where pandas would write.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import sys
import zoneinfo
from typing import Any

import msgspec
import numpy as np

from veloc_dask.storage.errors import IntegrityError, NotSupported

__all__ = ["Inexact", "from_arrow", "is_frame", "to_arrow"]

_KEY = b"veloc_dask"
_PROVEN_LIMIT = 1024
_UNITS = ("s", "ms", "us", "ns")
_MASKED = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64", "boolean")

_proven: dict[bytes, str] = {}  # description -> "" if its empty slice came back exactly, else what was wrong


class Inexact(Exception):
    """Arrow would not give this value back exactly; the text says why."""


@functools.cache
def _pandas() -> Any:
    return importlib.import_module("pandas")


@functools.cache
def _arrow() -> Any:
    importlib.import_module("pyarrow.ipc")
    return importlib.import_module("pyarrow")


def is_frame(value: Any) -> bool:
    """Whether the value is a DataFrame, Series or Index of pandas, or of a subclass.

    Examples
    --------
    >>> is_frame([1, 2])
    False
    """
    pd = sys.modules.get("pandas")  # a value of pandas cannot exist before somebody imported it
    return pd is not None and isinstance(value, pd.DataFrame | pd.Series | pd.Index)


def to_arrow(value: Any) -> list[memoryview]:
    """The Arrow IPC stream of a DataFrame, Series or Index, as pieces that refer to the value's memory.

    Raises
    ------
    Inexact
        The value is of a kind that only pickle keeps exactly.

    Examples
    --------
    >>> import pandas as pd
    >>> stream = bytearray().join(to_arrow(pd.Series([1.5, 2.5], name="a")))
    >>> list(from_arrow(memoryview(stream), "t/c/0", trusted=True))
    [1.5, 2.5]
    """
    try:
        pa = _arrow()
    except ImportError:
        raise Inexact("pyarrow is not installed") from None
    try:
        spec = _describe(value)
        _prove(value, spec)
        return _stream(value, spec)
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError) as error:
        raise Inexact(f"Arrow refused it: {error}") from error


def from_arrow(payload: memoryview, name: str, *, trusted: bool) -> Any:
    """The pandas value in an Arrow IPC stream that `to_arrow` wrote and whose checksum was verified.

    Parameters
    ----------
    payload
        The stream; Arrow-backed columns go on referring to it.
    name
        For messages.
    trusted
        False checks every offset, text and code, so that a forged stream cannot make Arrow read elsewhere.

    Raises
    ------
    IntegrityError
        The stream is malformed.
    NotSupported
        The stream is sound, but these versions of pandas, pyarrow or the time zones cannot rebuild it.
    """
    try:
        pa = _arrow()
        _pandas()
    except ImportError as error:
        raise NotSupported(f"{name} is a pandas value: install pandas and pyarrow to read it ({error})") from error
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            table = reader.read_all()
        table.validate(full=not trusted)
        spec = msgspec.json.decode(table.schema.metadata[_KEY])
    except (pa.ArrowException, ValueError, TypeError, LookupError, OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{name}: the Arrow stream is malformed: {type(error).__name__}: {error}") from error
    try:
        return _rebuild(table, spec)
    except (pa.ArrowException, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise NotSupported(
            f"{name} is intact, but pandas {_pandas().__version__} with pyarrow {pa.__version__} cannot rebuild it "
            f"({type(error).__name__}: {error}); read it with the versions that wrote it"
        ) from error


# --- description ---


def _describe(value: Any) -> dict[str, Any]:
    """Everything of a value but its elements; raises Inexact for whatever is not on the list."""
    pd = _pandas()
    kind = type(value)
    if kind is pd.DataFrame:
        _no_extras(value)
        columns = [_dtype_spec(dtype) for dtype in value.dtypes]
        return {
            "kind": "frame",
            "index": _index_spec(value.index),
            "columns": columns,
            "labels": _labels(value.columns),
        }
    if kind is pd.Series:
        _no_extras(value)
        name = _name(value.name)
        return {
            "kind": "series",
            "index": _index_spec(value.index),
            "columns": [_dtype_spec(value.dtype)],
            "name": name,
        }
    return {"kind": "index", "index": _index_spec(value)}


def _no_extras(value: Any) -> None:
    if value.attrs:
        raise Inexact("it has attrs")
    if not value.flags.allows_duplicate_labels:
        raise Inexact("its flags are not the default")


def _name(name: Any) -> str | None:
    if name is not None and type(name) is not str:
        raise Inexact(f"a name is of type {type(name).__name__}")
    text: str | None = name
    return text


def _index_spec(index: Any) -> dict[str, Any]:
    pd = _pandas()
    if type(index) is pd.RangeIndex:
        return {"name": _name(index.name), "range": [index.start, index.stop, index.step]}
    if type(index) not in (pd.Index, pd.DatetimeIndex, pd.TimedeltaIndex, pd.CategoricalIndex):
        raise Inexact(f"an index is a {type(index).__name__}")
    if getattr(index, "freq", None) is not None:
        raise Inexact("an index has a freq")
    return {"name": _name(index.name), "type": type(index).__name__, "dtype": _dtype_spec(index.dtype)}


def _labels(columns: Any) -> dict[str, Any]:
    pd = _pandas()
    if type(columns) is pd.RangeIndex:
        return _index_spec(columns)
    if type(columns) is not pd.Index or not all(type(label) is str for label in columns):
        raise Inexact("the column labels are not all plain strings")
    if not columns.is_unique:
        raise Inexact("column labels occur twice")
    dtype = {"object": True} if columns.dtype == np.dtype(object) else _dtype_spec(columns.dtype)
    return {"name": _name(columns.name), "values": list(columns), "dtype": dtype}


def _dtype_spec(dtype: Any) -> dict[str, Any]:
    pd = _pandas()
    if isinstance(dtype, np.dtype):
        plain = dtype.isnative and dtype.metadata is None
        if plain and (dtype.kind in "biu" or (dtype.kind == "f" and dtype.itemsize in (4, 8))):
            return {"numpy": dtype.str}
        if plain and dtype.kind in "mM" and np.datetime_data(dtype)[0] in _UNITS and np.datetime_data(dtype)[1] == 1:
            return {"numpy": dtype.str}
    elif type(dtype) is pd.DatetimeTZDtype:
        return {"unit": dtype.unit, "tz": _tz_spec(dtype.tz)}
    elif type(dtype) is pd.StringDtype:
        return {"string": dtype.storage, "nan": dtype.na_value is not pd.NA}
    elif type(dtype) is pd.CategoricalDtype:
        categories = dtype.categories
        if categories is None or type(categories) is pd.RangeIndex or type(categories) is pd.CategoricalIndex:
            raise Inexact("its categories are not a plain index")
        spec = _index_spec(categories)
        if spec["name"] is not None:
            raise Inexact("its categories have a name")
        return {"categories": spec["dtype"], "ordered": bool(dtype.ordered)}
    elif type(dtype) is pd.ArrowDtype and _simple(dtype.pyarrow_dtype):
        return {"arrow": str(dtype.pyarrow_dtype)}
    elif getattr(dtype, "name", None) in _MASKED and type(dtype) is getattr(pd, f"{_capital(dtype.name)}Dtype", None):
        return {"masked": dtype.name}
    raise Inexact(f"dtype {dtype} is not kept exactly")


def _capital(name: str) -> str:
    return "Boolean" if name == "boolean" else name


def _simple(kind: Any) -> bool:
    types = _arrow().types
    primitive = types.is_boolean(kind) or types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    time = types.is_timestamp(kind) or types.is_duration(kind) or types.is_date(kind) or types.is_time(kind)
    return bool(primitive or text or time or types.is_decimal128(kind))


def _tz_spec(tz: Any) -> list[Any]:
    if type(tz) is zoneinfo.ZoneInfo and tz.key is not None:
        return ["zone", tz.key]
    if tz is datetime.timezone.utc:  # noqa: UP017 - the object that pandas itself uses
        return ["utc", "UTC"]
    raise Inexact(f"time zone {tz!r} ({type(tz).__name__}) is not kept exactly")


# --- values to Arrow ---


def _stream(value: Any, spec: dict[str, Any]) -> list[memoryview]:
    pa = _arrow()
    arrays: list[Any] = []
    names: list[str] = []
    if spec["kind"] == "frame":
        labels = value.columns
        for i, column in enumerate(spec["columns"]):
            arrays.append(_to_array(value.iloc[:, i], column))
            names.append(str(labels[i]))
    elif spec["kind"] == "series":
        arrays.append(_to_array(value, spec["columns"][0]))
        names.append("0" if spec["name"] is None else spec["name"])
    index = value if spec["kind"] == "index" else value.index
    index_column: Any = {"kind": "range", "name": index.name}
    if "range" in spec["index"]:
        start, stop, step = spec["index"]["range"]
        index_column |= {"start": start, "stop": stop, "step": step}
    else:
        index_column = _free_name(spec["index"]["name"], names)
        arrays.append(_to_array(index, spec["index"]["dtype"]))
        names.append(index_column)
    metadata = {_KEY: msgspec.json.encode(spec, order="sorted")}
    if spec["kind"] != "index":
        metadata[b"pandas"] = _pandas_metadata(value, spec, index_column)
    table = pa.table(arrays, schema=pa.schema(zip(names, [a.type for a in arrays], strict=True), metadata=metadata))
    sink = _Pieces()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as writer:
        if table.num_rows:
            writer.write_table(table)
        else:  # write_table would write no batch, and with it no dictionary of categories
            writer.write_batch(pa.RecordBatch.from_arrays([_single(a) for a in arrays], schema=table.schema))
    return sink.pieces


class _Pieces:
    """A file that keeps what Arrow writes: its messages as bytes, its column buffers by reference."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        if piece.nbytes:
            self.pieces.append(piece)
        return piece.nbytes

    def flush(self) -> None:
        pass


def _free_name(name: str | None, taken: list[str]) -> str:
    candidate = "__index_level_0__" if name is None else name
    while candidate in taken:
        candidate = f"__{candidate}__"
    return candidate


def _pandas_metadata(value: Any, spec: dict[str, Any], index_column: Any) -> bytes:
    """What other readers need to make a frame of the stream; our own reader does not look at it."""
    pa = _arrow()
    empty = value.iloc[:0]
    if spec["kind"] == "series":
        empty = empty.to_frame("0" if spec["name"] is None else spec["name"])
    theirs = msgspec.json.decode(pa.Schema.from_pandas(empty).metadata[b"pandas"])
    field = theirs["index_columns"][0] if theirs["index_columns"] else None
    for column in theirs["columns"]:
        if isinstance(index_column, str) and column["field_name"] == field:
            column["field_name"] = index_column
    theirs["index_columns"] = [index_column]
    return msgspec.json.encode(theirs, order="sorted")


def _to_array(values: Any, spec: dict[str, Any]) -> Any:
    """Arrow array of a series or an index of a described dtype."""
    pa = _arrow()
    if "numpy" in spec:
        data = values.to_numpy(copy=False)
        return pa.array(data, from_pandas=data.dtype.kind in "mM")
    if "tz" in spec:
        naive = pa.array(np.asarray(values, dtype=f"M8[{spec['unit']}]"), from_pandas=True)
        return naive.view(pa.timestamp(spec["unit"], tz=spec["tz"][1]))
    if "categories" in spec:
        codes = values.array.codes
        missing = codes < 0
        indices = pa.array(codes, mask=missing) if missing.any() else pa.array(codes)
        categories = _to_array(values.array.categories, spec["categories"])
        if isinstance(categories, pa.ChunkedArray):
            categories = categories.combine_chunks()
        return pa.DictionaryArray.from_arrays(indices, categories, ordered=spec["ordered"])
    return pa.array(values.array)


# --- Arrow to values ---


def _rebuild(table: Any, spec: dict[str, Any]) -> Any:
    pd = _pandas()
    kind = spec["kind"]
    columns = [_from_array(table.column(i), column) for i, column in enumerate(spec.get("columns", ()))]
    if "range" in spec["index"]:
        index = pd.RangeIndex(*spec["index"]["range"], name=spec["index"]["name"])
    else:
        index = pd.Index(_from_array(table.column(len(columns)), spec["index"]["dtype"]), copy=True)
        index.name = spec["index"]["name"]
    if any(len(column) != len(index) for column in columns):
        raise ValueError(f"columns of {[len(column) for column in columns]} rows with an index of {len(index)}")
    if kind == "index":
        return index
    if kind == "series":
        return pd.Series(columns[0], index=index, name=spec["name"], copy=True)
    frame = pd.DataFrame(dict(enumerate(columns)), index=index, copy=True)  # the copy is writable, and consolidated
    labels = spec["labels"]
    if "range" in labels:
        frame.columns = pd.RangeIndex(*labels["range"], name=labels["name"])
    else:
        dtype = object if "object" in labels["dtype"] else _string_dtype(labels["dtype"])
        frame.columns = pd.Index(labels["values"], dtype=dtype, name=labels["name"])
    return frame


def _string_dtype(spec: dict[str, Any]) -> Any:
    pd = _pandas()
    return pd.StringDtype(spec["string"], na_value=np.nan if spec["nan"] else pd.NA)


def _from_array(chunked: Any, spec: dict[str, Any]) -> Any:
    pd = _pandas()
    if "categories" in spec:
        array = _single(chunked)
        categories = pd.Index(_from_array(array.dictionary, spec["categories"]), copy=True)
        codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return pd.Categorical.from_codes(codes, dtype=pd.CategoricalDtype(categories, ordered=spec["ordered"]))
    if "numpy" in spec or "tz" in spec:
        dtype = np.dtype(spec["numpy"] if "numpy" in spec else f"M8[{spec['unit']}]")
        array = _single(chunked)
        if dtype.kind in "iuf" and array.null_count:
            raise ValueError(f"nulls in a column of {dtype}")
        data = array.to_numpy(zero_copy_only=False)
        if data.dtype != dtype:
            raise ValueError(f"expected a column of {dtype}, found {data.dtype}")
        if "numpy" in spec:
            return data
        zone, key = spec["tz"]
        tz = zoneinfo.ZoneInfo(key) if zone == "zone" else datetime.timezone.utc  # noqa: UP017
        return pd.DatetimeIndex(data, copy=True).tz_localize(datetime.timezone.utc).tz_convert(tz).array  # noqa: UP017
    if "string" in spec:
        return _string_dtype(spec).__from_arrow__(chunked)
    if "arrow" in spec:
        return pd.ArrowDtype(chunked.type).__from_arrow__(chunked)
    return pd.api.types.pandas_dtype(spec["masked"]).__from_arrow__(chunked)


def _single(array: Any) -> Any:
    pa = _arrow()
    if not isinstance(array, pa.ChunkedArray):
        return array
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()


# --- proof ---


def _prove(value: Any, spec: dict[str, Any]) -> None:
    """Send an empty slice through the whole path, once per description, and compare strictly."""
    empty = value[:0] if spec["kind"] == "index" else value.iloc[:0]
    expected = _describe(empty)
    key = msgspec.json.encode(expected, order="sorted")
    verdict = _proven.get(key)
    if verdict is None:
        verdict = ""
        try:
            back = from_arrow(memoryview(bytearray().join(_stream(empty, expected))), "empty slice", trusted=True)
        except (IntegrityError, NotSupported) as error:
            verdict = str(error)
        else:
            if _describe(back) != expected or _dtypes(back) != _dtypes(empty):
                verdict = "pandas changed its dtypes"
        if len(_proven) >= _PROVEN_LIMIT:
            _proven.clear()
        _proven[key] = verdict
    if verdict:
        raise Inexact(verdict)


def _dtypes(value: Any) -> list[Any]:
    """All dtypes of a value, with the types of dtypes and time zones, which == does not look at."""
    dtypes = [value.dtype] if not hasattr(value, "columns") else [*value.dtypes, value.columns.dtype]
    dtypes += [value.index.dtype] if hasattr(value, "index") else []
    return [(type(d), d, type(getattr(d, "tz", None)), getattr(d, "tz", None)) for d in dtypes]
