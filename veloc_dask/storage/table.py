"""The block table: one row per block, stored as columnar binary segments.

Only the table says that a block exists: a missing Zarr chunk would read as zeros. A row says all that is needed to read a
block without ``zarr.json`` and without its neighbours. Segments are the same bytes for the same rows.

Segment layout (``docs/format.md`` has the details)::

    b"VELOCTB1"  msgpack map of columns

Integer columns are little-endian arrays, text columns a list of distinct texts and an array of positions in it, tuples
(``index``, ``shape``) a column of lengths and one of values. Everything is checked against the row count before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from veloc_dask.storage import layout
from veloc_dask.storage.errors import IntegrityError

MAGIC = b"VELOCTB1"
SEGMENT_ROWS = 8192  # so that no step on an event loop handles more than about a megabyte
MAX_SEGMENT_NBYTES = 1 << 28
MAX_SEGMENT_ROWS = 1 << 18  # a row takes about a kilobyte once it is a Python object
ENCODINGS = frozenset({"array", "ndarray", "arrow", "pickle", "scalar", "bytes", "str"})


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored block."""

    item: str  # path of its item
    index: tuple[int, ...]  # position in the item's grid of blocks
    object: str  # file, relative to the version's directory
    offset: int  # where in the file the block begins
    stored_nbytes: int  # bytes in the file, header and checksum included
    nbytes: int  # bytes of the payload
    dtype: str
    shape: tuple[int, ...]
    order: str
    encoding: str
    codec: str  # "" none
    crc32c: int  # of the stored bytes but the last four, which repeat it
    digest: str  # strong digest, "" none


_INTS = {"offset": "<i8", "stored_nbytes": "<i8", "nbytes": "<i8", "crc32c": "<u4"}
_TEXTS = ("item", "object", "dtype", "order", "encoding", "codec", "digest")
_TUPLES = ("index", "shape")


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: list[str]
    codes: bytes


class _Tuple(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lengths: bytes
    values: bytes


class _Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nrows: int
    ints: dict[str, bytes]
    texts: dict[str, _Text]
    tuples: dict[str, _Tuple]


def encode_row(row: Row) -> bytes:
    """One row for a message; the scheduler keeps it without looking inside."""
    return msgspec.msgpack.encode(row)


def decode_row(data: bytes) -> Row:
    """A row out of a message."""
    return check_row(msgspec.msgpack.decode(data, type=Row))


def check_row(row: Row) -> Row:
    layout.check_object(row.object)
    layout.check_object(row.item)
    if row.encoding not in ENCODINGS or row.codec or row.digest:
        raise IntegrityError(
            f"{row.object}: encoding {row.encoding!r}, codec {row.codec!r}, digest {row.digest!r}: this version of veloc_dask "
            "does not know one of them; it may have been written by a newer one"
        )
    if min(row.offset, row.stored_nbytes, row.nbytes, *row.shape, *row.index) < 0:
        raise IntegrityError(f"{row.object}: a negative size in the block table")
    return row


def encode_segment(rows: Sequence[Row]) -> bytes:
    """The bytes of one segment; deterministic."""
    ints = {name: np.array([getattr(r, name) for r in rows], dt).tobytes() for name, dt in _INTS.items()}
    texts = {}
    for name in _TEXTS:
        positions: dict[str, int] = {}
        codes = [positions.setdefault(getattr(r, name), len(positions)) for r in rows]
        texts[name] = _Text(list(positions), np.array(codes, "<u4").tobytes())
    tuples = {}
    for name in _TUPLES:
        values: list[tuple[int, ...]] = [getattr(r, name) for r in rows]
        flat = [v for value in values for v in value]
        tuples[name] = _Tuple(bytes(len(v) for v in values), np.array(flat, "<i8").tobytes())
    return MAGIC + msgspec.msgpack.encode(_Segment(len(rows), ints, texts, tuples), order="sorted")


def decode_segment(data: bytes | memoryview) -> list[Row]:
    """The rows of a segment; IntegrityError if anything in it does not fit together."""
    view = memoryview(data)
    if len(view) > MAX_SEGMENT_NBYTES or bytes(view[: len(MAGIC)]) != MAGIC:
        raise IntegrityError(
            f"block table: expected a segment of at most {MAX_SEGMENT_NBYTES} bytes that begins with {MAGIC!r}"
        )
    try:
        segment = msgspec.msgpack.decode(view[len(MAGIC) :], type=_Segment)
        n = segment.nrows
        if not 0 <= n <= MAX_SEGMENT_ROWS:
            raise ValueError(f"expected at most {MAX_SEGMENT_ROWS} rows, found {n}")
        for found, known in ((segment.ints, _INTS), (segment.texts, _TEXTS), (segment.tuples, _TUPLES)):
            if found.keys() != set(known):
                raise ValueError(f"expected columns {sorted(known)}, found {sorted(found)[:20]}")
        columns: dict[str, Sequence[Any]] = {}
        for name, dt in _INTS.items():
            columns[name] = _ints(segment.ints[name], dt, n).tolist()
        for name in _TEXTS:
            text = segment.texts[name]
            codes = _ints(text.codes, "<u4", n)
            if n and int(codes.max()) >= len(text.values):
                raise ValueError(f"column {name}: a code without a text")
            columns[name] = [text.values[c] for c in codes.tolist()]
        for name in _TUPLES:
            pair = segment.tuples[name]
            lengths = _ints(pair.lengths, "u1", n)
            flat = _ints(pair.values, "<i8", int(lengths.sum())).tolist()
            ends = np.cumsum(lengths, dtype=np.int64).tolist()
            columns[name] = [tuple(flat[end - k : end]) for end, k in zip(ends, lengths.tolist(), strict=True)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IntegrityError(f"block table: a segment does not fit together: {error}") from error
    names = Row.__struct_fields__
    return [check_row(Row(*values)) for values in zip(*(columns[name] for name in names), strict=True)]


def _ints(data: bytes, dtype: str, count: int) -> npt.NDArray[Any]:
    values = np.frombuffer(data, dtype)
    if len(values) != count:
        raise ValueError(f"expected {count} values, found {len(values)}")
    return values
