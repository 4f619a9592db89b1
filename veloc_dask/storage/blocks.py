"""The value of a block as stored bytes, and back.

Owns the choice of encoding, the frame of a block's file and the check of its checksum. Does not open files, does not
know Dask, tiers or versions: worker capture calls `encode` and writes the buffers, the reader calls `decode` with the
fields of the block's row in the table.

A block's file, all integers little-endian; the crc32c covers all bytes before it::

    <item>/c/0/1   array form    the chunk in C order, padded with zeros to the chunk shape            , u32 crc32c
    <item>/c/0/1   blocks form   u32 1, u32 length, payload   (one element of a Zarr vlen-bytes array) , u32 crc32c
    <item>/x/0.1   either form   payload: a block that does not fit its array item, or is over 2 GiB   , u32 crc32c

Invariants: what `decode` returns equals what went in, in type, dtype, byte order, shape and values, or `encode`
refused; nothing is decoded before length, trailer and checksum were verified; plain arrays come back writable; a
contiguous array is never copied on its way out, and others go through pieces of `SLAB_BYTES`. Any path under ``c/`` is
readable by zarr, and a path under ``x/`` tells the caller that the item has no complete Zarr view.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from crc32c import crc32c as _crc32c_of

from veloc_dask.storage import frames, pickles
from veloc_dask.storage.errors import IntegrityError, NotSupported
from veloc_dask.storage.zarr_view import dtype_from_text, dtype_text, zarr_dtype

__all__ = ["Encoded", "ItemSpec", "array_item", "decode", "dtype_from_text", "dtype_text", "encode", "verify"]

Buffer = memoryview | bytes

SLAB_BYTES = 4 << 20  # copies of padded and non-contiguous arrays: one slab is read while the next is made, so 8 MiB
ELEMENT_LIMIT_BYTES = 2**31  # from here on a payload is a plain file: vlen-bytes has 32 bit lengths
PADDING_LIMIT = 0.25  # array form costs at most this much more bytes than the array has

_FRAME = struct.Struct("<II")  # vlen-bytes: number of elements, length of the only one
_CRC_NBYTES = 4
_TILE = 64  # elements of the last axis; measured: a third of the time of a copy of whole rows
_NUMPY_BYTES, _NUMPY_STR = '"|S1"', '"<U1"'  # in the dtype of a row with encoding bytes or str: a scalar of numpy


class ItemSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the encoder must know of the item that a block belongs to.

    Attributes
    ----------
    path
        Directory of the item inside a version ("u", "state/u"); validated by the caller.
    form
        "array": an ordinary Zarr array; "blocks": one element of bytes per block.
    grid
        Number of blocks along each dimension; () for a single object.
    shape, chunk, dtype
        Array form only: shape of the whole array, regular chunk shape, and dtype as `dtype_text` writes it.
    """

    path: str
    form: str
    grid: tuple[int, ...]
    shape: tuple[int, ...] = ()
    chunk: tuple[int, ...] = ()
    dtype: str = ""


def array_item(path: str, chunks: tuple[tuple[float, ...], ...], dtype: npt.DTypeLike) -> ItemSpec:
    """Choose the form of an array item from Dask's chunks (which may hold nan) and dtype.

    Array form where the chunks are regular and known, none is empty, Zarr has the dtype, and padding the edge chunks
    adds at most a quarter of the bytes; otherwise blocks form.

    Examples
    --------
    >>> array_item("u", ((4, 4, 2), (3,)), "f8").chunk
    (4, 3)
    >>> array_item("u", ((4, 2, 4), (3,)), "f8").form
    'blocks'
    """
    grid = tuple(len(sizes) for sizes in chunks)
    blocks = ItemSpec(path=path, form="blocks", grid=grid)
    dtype = np.dtype(dtype)
    text = dtype_text(dtype)
    if text is None or zarr_dtype(dtype) is None:
        return blocks
    for sizes in chunks:
        if not sizes or any(math.isnan(size) or size < 1 for size in sizes):
            return blocks
        if any(size != sizes[0] for size in sizes[:-1]) or sizes[-1] > sizes[0]:
            return blocks
    shape = tuple(int(sum(sizes)) for sizes in chunks)
    chunk = tuple(int(sizes[0]) for sizes in chunks)
    padded = math.prod(n * size for n, size in zip(grid, chunk, strict=True))
    if padded > math.prod(shape) * (1 + PADDING_LIMIT):
        return blocks
    return ItemSpec(path=path, form="array", grid=grid, shape=shape, chunk=chunk, dtype=text)


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A block ready to be written; it refers to the value's memory, so the value must not change until it is written.

    Attributes
    ----------
    object
        Path of the file inside the version, relative and posix.
    encoding
        "array", "ndarray", "scalar", "arrow", "pickle", "bytes" or "str".
    dtype, shape, order
        Of the value, for array, ndarray and scalar; "", () and "" otherwise.
    nbytes
        Bytes of the payload; for array form without the padding.
    stored_nbytes
        Exact length of the file, header, padding and the 4 byte checksum included.
    """

    object: str
    encoding: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    stored_nbytes: int
    _parts: Callable[[], Iterator[Buffer]]

    def buffers(self) -> Iterator[Buffer]:
        """The bytes of the file without the checksum, in order; a new call starts again (a retry on another tier)."""
        return self._parts()


@dataclass(frozen=True, slots=True)
class _Payload:
    """An encoded value before it has a place; parts(base) are its bytes, if it starts at byte base of its file."""

    encoding: str
    nbytes: Callable[[int], int]
    parts: Callable[[int], Iterator[Buffer]]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    order: str = ""


def encode(value: Any, item: ItemSpec, index: tuple[int, ...], *, allow_pickle: bool) -> Encoded:
    """Encode the value of one block of an item.

    Parameters
    ----------
    value
        Anything; what is neither a plain array, a scalar of numpy, a plain frame, str nor bytes needs pickle.
    item
        The item; a value that does not fit an array item is stored beside it.
    index
        Position of the block in the item's grid.
    allow_pickle
        Whether pickle may be used where nothing else is exact.

    Raises
    ------
    NotSupported
        The value lies in device memory, cannot be pickled, or needs pickle that is not allowed.

    Examples
    --------
    >>> item = array_item("u", ((2, 2),), "f8")
    >>> block = encode(np.arange(2.0), item, (1,), allow_pickle=False)
    >>> block.object, block.encoding, block.nbytes, block.stored_nbytes
    ('u/c/1', 'array', 16, 20)
    """
    if len(index) != len(item.grid) or not all(0 <= i < n for i, n in zip(index, item.grid, strict=True)):
        raise ValueError(f"block {index} lies outside the grid {item.grid} of item {item.path!r}")
    pickles.refuse_device_memory(value)
    inside = "/".join([item.path, "c", *map(str, index)])
    beside = f"{item.path}/x/{'.'.join(map(str, index)) or '0'}"
    payload = _raw_payload(value)
    if item.form == "array":
        if payload is not None and payload.dtype == item.dtype and payload.shape == _chunk_shape(item, index):
            return _array_form(value, payload, item, inside)
    elif item.form != "blocks":
        raise ValueError(f"item {item.path!r}: form must be 'array' or 'blocks', not {item.form!r}")
    if payload is None:
        payload = _object_payload(value, allow_pickle)
    nbytes = payload.nbytes(_FRAME.size)
    framed = item.form == "blocks" and nbytes < ELEMENT_LIMIT_BYTES
    base = _FRAME.size if framed else 0
    if not framed:
        nbytes = payload.nbytes(0)

    def parts() -> Iterator[Buffer]:
        if framed:
            yield _FRAME.pack(1, nbytes)
        yield from payload.parts(base)

    return Encoded(
        object=inside if framed else beside,
        encoding=payload.encoding,
        dtype=payload.dtype,
        shape=payload.shape,
        order=payload.order,
        nbytes=nbytes,
        stored_nbytes=base + nbytes + _CRC_NBYTES,
        _parts=parts,
    )


def _array_form(value: Any, payload: _Payload, item: ItemSpec, path: str) -> Encoded:
    array = np.asarray(value)
    padded_nbytes = math.prod(item.chunk) * array.itemsize
    return Encoded(
        object=path,
        encoding="scalar" if payload.encoding == "scalar" else "array",
        dtype=item.dtype,
        shape=array.shape,
        order="C",
        nbytes=array.nbytes,
        stored_nbytes=padded_nbytes + _CRC_NBYTES,
        _parts=lambda: _c_order(array, item.chunk),
    )


def _chunk_shape(item: ItemSpec, index: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(c, n - i * c) for n, c, i in zip(item.shape, item.chunk, index, strict=True))


def _raw_payload(value: Any) -> _Payload | None:
    """Payload of what a dtype, a shape and raw bytes describe completely: plain arrays and scalars of numpy."""
    is_array = type(value) is np.ndarray
    if not is_array and not isinstance(value, np.generic):
        return None
    text = dtype_text(value.dtype)
    if text is None:
        return None
    array: npt.NDArray[Any] = np.asarray(value)
    if not is_array and not _same_scalar(value, array):
        return None
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    rows = array.T if order == "F" else array
    return _Payload(
        encoding="ndarray" if is_array else "scalar",
        nbytes=lambda base: array.nbytes,
        parts=lambda base: _c_order(rows, rows.shape),
        dtype=text,
        shape=array.shape,
        order=order,
    )


def _same_scalar(value: np.generic, array: npt.NDArray[Any]) -> bool:
    """Whether the 0-d array gives the scalar back: numpy drops trailing NULs of strings, and has two int64 types."""
    back = dtype_from_text(dtype_text(array.dtype) or "").type
    if type(value) is not back or array.shape != ():
        return False
    return not isinstance(value, str | bytes) or len(array[()]) == len(value)


def _object_payload(value: Any, allow_pickle: bool) -> _Payload:
    if type(value) in (bytes, str, np.bytes_, np.str_):  # numpy's where an array would drop NULs at their end
        is_bytes = isinstance(value, bytes)
        data = bytes(value) if is_bytes else value.encode("utf-8", "surrogatepass")
        dtype = "" if type(value) in (bytes, str) else _NUMPY_BYTES if is_bytes else _NUMPY_STR
        return _Payload("bytes" if is_bytes else "str", lambda base: len(data), lambda base: iter((data,)), dtype)
    reason = ""
    if frames.is_frame(value):
        try:
            pieces = frames.to_arrow(value)
        except frames.Inexact as inexact:
            reason = f" ({inexact})"
        else:
            return _Payload("arrow", lambda base: sum(p.nbytes for p in pieces), lambda base: iter(pieces))
    if not allow_pickle:
        kind = type(value)
        name = f"array of dtype {value.dtype}" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
        raise NotSupported(
            f"{name}{reason} can only be saved as pickle, and allow_pickle is False: "
            "allow it, or save plain arrays, frames, str or bytes"
        )
    pickled = pickles.dumps(value)
    return _Payload("pickle", pickled.nbytes, pickled.parts)


def _c_order(array: npt.NDArray[Any], full: tuple[int, ...]) -> Iterator[Buffer]:
    """The bytes of an array in C order, padded with zeros to the shape full; without a copy where it is contiguous."""
    if array.nbytes == 0 and math.prod(full) == 0:
        return
    if array.shape == full and array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
        return
    row_nbytes = math.prod(full[1:]) * array.itemsize
    if row_nbytes > SLAB_BYTES:
        for i in range(full[0]):
            if i < len(array):
                yield from _c_order(array[i, ...], full[1:])
            else:
                yield from (bytes(min(SLAB_BYTES, row_nbytes - at)) for at in range(0, row_nbytes, SLAB_BYTES))
        return
    step = max(1, SLAB_BYTES // row_nbytes)
    for start in range(0, full[0], step):
        stop = min(start + step, full[0])
        # A new slab each time: a caller that collects buffers for one writev must not see the next slab in them.
        rows = array[start:stop]
        exact = rows.shape == (stop - start, *full[1:]) and array.dtype.names is None  # else zeros, in gaps too
        slab = (np.empty if exact else np.zeros)((stop - start, *full[1:]), array.dtype)
        _copy(slab[tuple(slice(n) for n in rows.shape)], rows)
        yield slab.reshape(-1).view(np.uint8).data


def _copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy an array; in tiles, where its memory does not run along the last axis (a transpose)."""
    strides = [abs(stride) if n > 1 else sys.maxsize for stride, n in zip(source.strides, source.shape, strict=True)]
    along = min(range(source.ndim), key=strides.__getitem__, default=-1)
    if source.ndim < 2 or strides[-1] <= strides[along] or source.shape[along] < _TILE // 8:
        target[...] = source
        return
    to, of = np.moveaxis(target, along, -2), np.moveaxis(source, along, -2)
    for index in np.ndindex(*of.shape[:-2]):
        for start in range(0, of.shape[-1], _TILE):
            # Whole rows would touch a cache line for each element, and lose it before its neighbour is asked for.
            tile = (*index, slice(None), slice(start, start + _TILE))
            to[tile] = of[tile]


def verify(stored: Any, *, object: str, stored_nbytes: int, crc32c: int) -> None:
    """Check that a buffer holds exactly the file that was written.

    Raises
    ------
    IntegrityError
        Its length, its trailer or its checksum is not what the table says.

    Examples
    --------
    >>> verify(bytearray(b"123456789\\x83\\x92\\x06\\xe3"), object="u/c/0", stored_nbytes=13, crc32c=0xE3069283)
    """
    view = memoryview(stored).cast("B")
    if view.nbytes != stored_nbytes or stored_nbytes < _CRC_NBYTES:
        raise IntegrityError(f"{object}: expected {stored_nbytes} bytes, found {view.nbytes}; the copy is torn")
    trailer = int.from_bytes(view[-_CRC_NBYTES:], "little")
    if trailer != crc32c:
        raise IntegrityError(f"{object}: expected checksum {crc32c:08x}, found {trailer:08x} at the end of the file")
    found = _crc32c_of(view[:-_CRC_NBYTES])
    if found != crc32c:
        raise IntegrityError(f"{object}: expected checksum {crc32c:08x}, computed {found:08x}; the copy is damaged")


def decode(
    stored: Any,
    *,
    object: str,
    encoding: str,
    dtype: str,
    shape: Sequence[int],
    order: str,
    nbytes: int,
    stored_nbytes: int,
    crc32c: int,
    item: ItemSpec | None = None,
    allow_pickle: bool,
) -> Any:
    """The value of a block, from its whole file and its row in the table.

    Parameters
    ----------
    stored
        Writable contiguous buffer with exactly the file. Arrays alias it where alignment and contiguity allow.
    item
        Needed for padded chunks alone, whose full shape only the item knows.
    allow_pickle
        Whether a pickle may be loaded: it can run any code.

    Raises
    ------
    IntegrityError
        The file is not what was written, or the row contradicts it.
    NotSupported
        The block is a pickle and pickle is not allowed, or its encoding is not known.

    Examples
    --------
    >>> block = encode(np.arange(3), ItemSpec("t", "blocks", (1,)), (0,), allow_pickle=False)
    >>> data = bytearray().join(block.buffers())
    >>> crc = _crc32c_of(data)
    >>> decode(data + crc.to_bytes(4, "little"), object=block.object, encoding=block.encoding, dtype=block.dtype,
    ...        shape=block.shape, order=block.order, nbytes=block.nbytes, stored_nbytes=block.stored_nbytes,
    ...        crc32c=crc, allow_pickle=False)
    array([0, 1, 2])
    """
    verify(stored, object=object, stored_nbytes=stored_nbytes, crc32c=crc32c)
    content = memoryview(stored).cast("B")[:-_CRC_NBYTES]
    if encoding == "array" or (encoding == "scalar" and content.nbytes == nbytes):
        array = _chunk(content, object, dtype, tuple(shape), nbytes, item)
        return array if encoding == "array" else array[()]
    payload = _payload(content, object, nbytes)
    match encoding:
        case "ndarray":
            return _array(payload, object, dtype, tuple(shape), order)
        case "scalar":
            return _array(payload, object, dtype, (), "C")[()]
        case "bytes":
            return np.bytes_(payload) if dtype == _NUMPY_BYTES else bytes(payload)
        case "str":
            text = str(payload, "utf-8", "surrogatepass")
            return np.str_(text) if dtype == _NUMPY_STR else text
        case "arrow":
            return frames.from_arrow(payload, object, trusted=allow_pickle)
        case "pickle":
            if not allow_pickle:
                raise NotSupported(f"{object} is a pickle, and allow_pickle is False: allow it if you trust the store")
            return pickles.loads(payload, object)
    raise NotSupported(f"{object}: encoding {encoding!r} is not known; a newer veloc_dask wrote it")


def _payload(content: memoryview, name: str, nbytes: int) -> memoryview:
    if content.nbytes == nbytes:
        return content
    frame = bytes(content[: _FRAME.size])
    if content.nbytes != nbytes + _FRAME.size or frame != _FRAME.pack(1, nbytes):
        raise IntegrityError(f"{name}: expected one element of {nbytes} bytes, found frame {frame.hex()}")
    return content[_FRAME.size :]


def _chunk(
    content: memoryview, name: str, text: str, shape: tuple[int, ...], nbytes: int, item: ItemSpec | None
) -> npt.NDArray[Any]:
    if content.nbytes == nbytes:
        return _array(content, name, text, shape, "C")
    if item is None or item.form != "array" or len(item.chunk) != len(shape):
        raise IntegrityError(f"{name}: {nbytes} bytes padded to {content.nbytes}, and no array item to tell how")
    if any(not 0 <= n <= c for n, c in zip(shape, item.chunk, strict=True)):
        raise IntegrityError(f"{name}: shape {shape} does not fit in the chunk shape {item.chunk}")
    padded = _array(content, name, text, item.chunk, "C")
    array = padded[tuple(slice(n) for n in shape)]
    if array.nbytes != nbytes:
        raise IntegrityError(f"{name}: expected {nbytes} bytes in shape {shape} of {text}, found {array.nbytes}")
    return array if array.flags.c_contiguous else array.copy()


def _array(content: memoryview, name: str, text: str, shape: tuple[int, ...], order: Any) -> npt.NDArray[Any]:
    dtype = dtype_from_text(text)
    sound = order in ("C", "F") and all(type(n) is int and n >= 0 for n in shape)
    if not sound or math.prod(shape) * dtype.itemsize != content.nbytes:
        raise IntegrityError(f"{name}: {content.nbytes} bytes are not an array of {dtype}, {shape}, order {order!r}")
    if content.nbytes == 0:
        return np.empty(shape, dtype, order=order)
    array = np.frombuffer(content, dtype).reshape(shape, order=order)
    return array if array.flags.aligned and array.flags.writeable else array.copy(order="K")
