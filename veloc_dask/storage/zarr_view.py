"""The ``zarr.json`` documents that show a version's blocks to any Zarr v3 reader, and dtypes as JSON text.

Owns the spelling of dtypes (ours in the block table, Zarr's in ``zarr.json``) and of group and array documents. It
reads and writes no file and imports no zarr: the commit calls it once per item, and the documents must not depend on
the zarr-python that happens to be installed.

Invariants: pure and deterministic (the same item gives the same bytes, so that a root can carry their sha256); a dtype
is only claimed when zarr 3.1 (Python 3.11) and zarr 3.4 both open it and read equal values; everything else is stored
in the blocks form, whose document is the same for every payload. The view is a courtesy: what exists, and byte order,
is said by the block table alone.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from veloc_dask.storage.errors import IntegrityError

if TYPE_CHECKING:
    from veloc_dask.storage.blocks import ItemSpec

__all__ = ["array_json", "dtype_from_text", "dtype_text", "group_json", "zarr_dtype"]

_NAT = -(2**63)
_DTYPE_TEXT_LIMIT = 1 << 20  # a table row is not the place for a dtype with 10,000 fields
_DTYPE_DEPTH_LIMIT = 32


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Canonical JSON text of a dtype, or None where the text would not give the same dtype back.

    None for object and string dtypes, for dtypes of other packages, and where metadata, titles, alignment or the
    scalar type (``np.record``) would be lost.

    Examples
    --------
    >>> dtype_text(np.dtype(">f8")), dtype_text(np.dtype([("a", "<i4"), ("b", "S3")])), dtype_text(np.dtype(object))
    ('">f8"', '[["a","<i4"],["b","|S3"]]', None)
    """
    if not _plain_dtype(dtype):
        return None
    try:
        text = msgspec.json.encode(np.lib.format.dtype_to_descr(dtype)).decode()
        back = _parse(text)
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
    ):  # numpy has no descr for overlapping fields; a name that JSON has no spelling for
        return None
    return text if back == dtype and _plain_dtype(back) and back.itemsize == dtype.itemsize else None


def dtype_from_text(text: str) -> np.dtype[Any]:
    """The dtype that `dtype_text` wrote; anything else is refused.

    Raises
    ------
    IntegrityError
        The text is malformed, not canonical, or names an object dtype.

    Examples
    --------
    >>> dtype_from_text('">f8"')
    dtype('>f8')
    """
    try:
        dtype = _parse(text)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise IntegrityError(f"malformed dtype {text[:200]!r} in the block table: {error}") from error
    if dtype_text(dtype) != text:
        raise IntegrityError(f"dtype {text[:200]!r} in the block table is not one that is stored as raw bytes")
    return dtype


def _plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether dtype consists of numpy's own fixed-size types alone, with nothing attached that its text would lose."""
    if dtype.hasobject or dtype.metadata is not None or dtype.isalignedstruct or dtype.itemsize == 0:
        return False
    if dtype.subdtype is not None:
        return _plain_dtype(dtype.subdtype[0])
    if dtype.fields is not None:
        if dtype.type is not np.void:
            return False
        return all(len(field) == 2 and _plain_dtype(field[0]) for field in dtype.fields.values())  # 3: it has a title
    return dtype.isbuiltin != 2 and dtype.kind in "biufcmMSUV" and dtype.type.__module__ == "numpy"


def _parse(text: str) -> np.dtype[Any]:
    if len(text) > _DTYPE_TEXT_LIMIT:
        raise ValueError(f"{len(text)} characters long")
    return np.lib.format.descr_to_dtype(_descr(msgspec.json.decode(text), 0))


def _descr(node: Any, depth: int) -> Any:
    """JSON has no tuples, numpy insists on them: rebuild the shape of a descr, and check it on the way."""
    if isinstance(node, str) and node:
        np.dtype(node)  # comma-separated strings parse too, and are refused by the comparison of texts
        return node
    if not isinstance(node, list) or not node or depth > _DTYPE_DEPTH_LIMIT:
        raise ValueError("neither a type string nor a list of fields")
    fields: list[Any] = []
    for field in node:
        if not isinstance(field, list) or len(field) not in (2, 3) or not isinstance(field[0], str):
            raise ValueError(f"field {str(field)[:100]} is not [name, type] or [name, type, shape]")
        if len(field) == 3:
            shape = field[2]
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"field {field[0]!r} has no valid shape")
            fields.append((field[0], _descr(field[1], depth + 1), tuple(shape)))
        else:
            fields.append((field[0], _descr(field[1], depth + 1)))
    return fields


def zarr_dtype(dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """``data_type`` and ``fill_value`` of a dtype in Zarr v3, or None where the versions of zarr do not agree on one.

    Structured dtypes are spelled ``structured`` with pairs, which 3.4 still reads; 3.1 refuses the newer ``struct``.
    They must be packed and little-endian, because the ``bytes`` codec of 3.1 does not look into their fields.

    Examples
    --------
    >>> zarr_dtype(np.dtype(">i4")), zarr_dtype(np.dtype("M8[us]"))[0]["configuration"], zarr_dtype(np.dtype("g"))
    (('int32', 0), {'unit': 'us', 'scale_factor': 1}, None)
    """
    if dtype_text(dtype) is None:
        return None
    size = dtype.itemsize
    match dtype.kind:
        case "b":
            return "bool", False
        case "i" | "u":
            return dtype.name, 0
        case "f" if size in (2, 4, 8):
            return dtype.name, 0.0
        case "c" if size in (8, 16):
            return dtype.name, [0.0, 0.0]
        case "M" | "m":
            unit, count = np.datetime_data(dtype)
            if unit == "generic":  # zarr 3.1 writes it, and then refuses its fill value
                return None
            name = "numpy.datetime64" if dtype.kind == "M" else "numpy.timedelta64"
            return {"name": name, "configuration": {"unit": unit, "scale_factor": count}}, _NAT
        case "U":
            return {"name": "fixed_length_utf32", "configuration": {"length_bytes": size}}, ""
        case "S":
            return {"name": "null_terminated_bytes", "configuration": {"length_bytes": size}}, ""
        case "V":
            fill = base64.b64encode(bytes(size)).decode()
            if dtype.fields is None:
                return {"name": "raw_bytes", "configuration": {"length_bytes": size}}, fill
            fields = _zarr_fields(dtype)
            return None if fields is None else ({"name": "structured", "configuration": {"fields": fields}}, fill)
    return None


def _zarr_fields(dtype: np.dtype[Any]) -> list[Any] | None:
    fields: list[Any] = []
    end = 0
    for name in dtype.names or ():
        field, offset = dtype.fields[name][:2]  # type: ignore[index]  # what has names has fields
        inner = None if field.subdtype is not None or _endian(field) == "big" else zarr_dtype(field)
        if inner is None or offset != end:  # out of order, overlapping or with a gap: zarr would read it as packed
            return None
        end += field.itemsize
        fields.append([name, inner[0]])
    return fields if end == dtype.itemsize else None


def _endian(dtype: np.dtype[Any]) -> str | None:
    """Byte order for the ``bytes`` codec; None for single-byte, raw and structured types, as zarr itself writes it."""
    return {"<": "little", ">": "big", "|": None}[dtype.str[0]]


def group_json(attributes: Mapping[str, Any] | None = None) -> bytes:
    """The ``zarr.json`` of a group.

    Examples
    --------
    >>> group_json({"b": 1, "a": 2})
    b'{"attributes":{"a":2,"b":1},"node_type":"group","zarr_format":3}'
    """
    return _canonical({"attributes": attributes or {}, "node_type": "group", "zarr_format": 3})


def array_json(
    item: ItemSpec,
    dimension_names: Sequence[str | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """The ``zarr.json`` of an item: its native array, or one ``variable_length_bytes`` element per block.

    Parameters
    ----------
    item
        As made by `array_item`, or by the caller for the blocks form.
    dimension_names
        One per dimension of what the document describes: the array, or the grid of blocks.
    attributes
        JSON values; numpy scalars and arrays are converted, NaN and infinities become strings (JSON has none).

    Examples
    --------
    >>> from veloc_dask.storage.blocks import ItemSpec
    >>> array_json(ItemSpec("t", "blocks", (3,))).decode()[:52]
    '{"attributes":{},"chunk_grid":{"configuration":{"chu'
    """
    if item.form == "array":
        dtype = dtype_from_text(item.dtype)
        spelled = zarr_dtype(dtype)
        if spelled is None:
            raise ValueError(f"item {item.path!r}: dtype {dtype} has no Zarr data type; its form must be 'blocks'")
        (data_type, fill_value), shape, chunk = spelled, item.shape, item.chunk
        # zarr 3.4 warns where the order of structured fields is not said; they are all little-endian, see zarr_dtype
        endian = "little" if dtype.names else _endian(dtype)
        first: dict[str, Any] = {"name": "bytes"}
        if endian is not None:
            first["configuration"] = {"endian": endian}
    else:
        data_type, fill_value, shape, chunk = "variable_length_bytes", "", item.grid, (1,) * len(item.grid)
        first = {"name": "vlen-bytes", "configuration": {}}
    document: dict[str, Any] = {
        "attributes": attributes or {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [first, {"name": "crc32c"}],
        "data_type": data_type,
        "fill_value": fill_value,
        "node_type": "array",
        "shape": shape,
        "storage_transformers": [],
        "zarr_format": 3,
    }
    if dimension_names is not None:
        if len(dimension_names) != len(shape):
            raise ValueError(f"item {item.path!r}: {len(dimension_names)} dimension names for {len(shape)} dimensions")
        document["dimension_names"] = dimension_names
    return _canonical(document)


def _canonical(document: Any) -> bytes:
    return msgspec.json.encode(_plain(document), order="sorted")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
