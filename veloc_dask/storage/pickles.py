"""Python objects as bytes: pickle protocol 5 with out-of-band buffers in a small container of ours.

Owns the container, the choice between pickle and cloudpickle, and the refusal of values in device memory. Whether
pickle may be used at all is decided by the caller; checksums are verified by the caller before `loads` sees a byte.

Container, version 1, all integers little-endian::

    8 bytes   magic  b"vd-pkl1\\n"
    u64       n      number of buffers
    u64       s      length of the pickle stream
    n times   u64 offset from the start of the container, u64 length
    s bytes   the pickle stream (protocol 5)
    buffers   in order, each after fewer than 64 zero bytes, so that it starts at a multiple of 64 *in the file*

Invariants: the container ends with its last buffer (or the stream); a reader checks every number against the length
that it was given before it uses it; buffers are neither copied on the way out nor on the way in, and keep their
writability.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from veloc_dask.storage.errors import IntegrityError, NotSupported

__all__ = ["Pickled", "dumps", "loads", "refuse_device_memory"]

MAGIC = b"vd-pkl1\n"
ALIGNMENT = 64
IN_BAND_BYTES = 4096  # below this the entry, the padding and a memoryview cost more than the copy

_FRAME_LIMIT_BYTES = 1 << 20  # no frame of the pickler is larger

_HEAD = struct.Struct("<8sQQ")
_ENTRY = struct.Struct("<QQ")
_DEVICE_MODULES = ("cupy", "cupyx", "cudf", "cuml", "cuspatial", "rmm")


class Pickled:
    """A pickled value whose large buffers still lie in the value's own memory."""

    __slots__ = ("_buffers", "_stream", "mentions_main")

    def __init__(self, stream: bytearray, buffers: list[memoryview], *, mentions_main: bool) -> None:
        self.mentions_main = mentions_main  # something in it may be known in this process alone
        self._stream = stream
        self._buffers = buffers

    def _layout(self, base: int) -> tuple[list[tuple[int, int]], int]:
        """Offset and length of each buffer, and the length of the container, if it starts at byte base of its file."""
        end = _HEAD.size + _ENTRY.size * len(self._buffers) + len(self._stream)
        entries = []
        for buffer in self._buffers:
            start = end + -(base + end) % ALIGNMENT
            entries.append((start, buffer.nbytes))
            end = start + buffer.nbytes
        return entries, end

    def nbytes(self, base: int) -> int:
        """Length of the container, if it starts at byte base of its file."""
        return self._layout(base)[1]

    def parts(self, base: int) -> Iterator[memoryview | bytes]:
        """The container's bytes in order; may be called again."""
        entries, _ = self._layout(base)
        head = bytearray(_HEAD.pack(MAGIC, len(entries), len(self._stream)))
        for entry in entries:
            head += _ENTRY.pack(*entry)
        yield bytes(head)
        yield memoryview(self._stream)
        end = len(head) + len(self._stream)
        for buffer, (start, length) in zip(self._buffers, entries, strict=True):
            if start > end:
                yield bytes(start - end)
            yield buffer
            end = start + length


def dumps(value: Any) -> Pickled:
    """Pickle a value, by reference to its large buffers.

    Classes and functions that another process cannot import (``__main__``, local ones) are pickled by value with
    cloudpickle, where it is installed.

    Raises
    ------
    NotSupported
        The value cannot be pickled, or holds data in device memory.

    Examples
    --------
    >>> data = bytearray().join(dumps({"a": 1}).parts(0))
    >>> loads(memoryview(data), "t/c")
    {'a': 1}
    """
    cloud = _cloud_pickler()
    try:
        pickled = _dump(_Pickler, value)
    except (NotSupported, MemoryError):
        raise
    except Exception as error:  # what a __reduce__ of the user raises can be anything
        if cloud is None:
            raise _cannot(value, error) from error
        pickled = None
        first = error
    if cloud is not None and (pickled is None or pickled.mentions_main):
        try:
            return _dump(cloud, value)
        except (NotSupported, MemoryError):
            raise
        except Exception as error:
            if pickled is None:
                raise _cannot(value, first) from error
            return pickled  # "__main__" was only a text in it, or the class is importable after all
    assert pickled is not None
    return pickled


def loads(container: memoryview, name: str) -> Any:
    """The value in a container whose checksum was verified; its large buffers alias the container's memory.

    Raises
    ------
    IntegrityError
        The container is malformed.
    NotSupported
        The stream is sound, but cannot be unpickled here (a module that is missing, for example).
    """
    total = container.nbytes
    if total < _HEAD.size:
        raise IntegrityError(f"{name}: a pickle container has at least {_HEAD.size} bytes, found {total}")
    magic, count, stream_nbytes = _HEAD.unpack_from(container)
    if magic != MAGIC:
        raise IntegrityError(f"{name}: expected pickle container {MAGIC!r}, found {magic!r}")
    if count > (total - _HEAD.size) // _ENTRY.size:
        raise IntegrityError(f"{name}: a pickle container of {total} bytes cannot have {count} buffers")
    start = _HEAD.size + _ENTRY.size * count
    end = start + stream_nbytes
    if end > total:
        raise IntegrityError(f"{name}: the pickle stream ends at byte {end} of {total}")
    stream = container[start:end]
    buffers = []
    for offset, length in _ENTRY.iter_unpack(container[_HEAD.size : start]):
        if not end <= offset < end + ALIGNMENT or offset + length > total:
            raise IntegrityError(f"{name}: buffer at byte {offset}, length {length}, does not fit at {end} of {total}")
        end = offset + length
        buffers.append(container[offset:end])
    if end != total:
        raise IntegrityError(f"{name}: the pickle container ends at byte {end} of {total}")
    try:
        return pickle.loads(stream, buffers=buffers)
    except MemoryError:
        raise
    except Exception as error:
        raise NotSupported(
            f"{name} is intact, but cannot be unpickled here ({type(error).__name__}: {error}); "
            "make the modules of the saved objects importable on this process"
        ) from error


def refuse_device_memory(value: Any) -> None:
    """Raise `NotSupported` if the value lies in the memory of a GPU (or another device).

    Examples
    --------
    >>> refuse_device_memory([1, 2])
    """
    kind = type(value)
    module = kind.__module__ if isinstance(kind.__module__, str) else ""
    root = module.partition(".")[0]
    if root == "torch":  # its tensors have the CUDA interface on the class, wherever their data lie
        on_device = getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
    else:
        on_device = (
            root in _DEVICE_MODULES or module.startswith("numba.cuda") or hasattr(kind, "__cuda_array_interface__")
        )
    if on_device:
        raise NotSupported(
            f"{module}.{kind.__qualname__} lies in device memory, which is not saved: copy it to host memory first"
        )


class _Reductions:
    """Refuses device memory inside containers too, once per type; keeps of arrays what numpy's own reduction loses."""

    _host_types: set[type]

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind not in self._host_types:
            refuse_device_memory(obj)
            if not kind.__module__.startswith("torch"):
                self._host_types.add(kind)
        if kind is np.ndarray and not obj.flags.forc and not obj.dtype.hasobject:
            return np.array(obj, order="C").__reduce_ex__(5)  # numpy copies too, and loses the byte order
        if kind is np.ma.MaskedArray:
            reduced = _reduce_masked(obj)
            if reduced is not None:
                return reduced
        parent: Callable[[Any], Any] | None = getattr(super(), "reducer_override", None)
        return NotImplemented if parent is None else parent(obj)


def _reduce_masked(array: Any) -> tuple[Any, ...] | None:
    """Masked arrays by numpy's public constructor: their own reduction copies the data and forgets a hard mask."""
    state = vars(array)
    if state.get("_optinfo") or state.get("_basedict") or state.get("_baseclass") is not np.ndarray:
        return None
    data, mask = np.ma.getdata(array), np.ma.getmask(array)
    fill_value = state.get("_fill_value")  # None where numpy's default has not been asked for yet
    return np.ma.MaskedArray, (data, mask, None, False, True, 0, fill_value, True, array.hardmask)


class _Pickler(_Reductions, pickle.Pickler):
    pass


@functools.cache
def _cloud_pickler() -> type[Any] | None:
    try:
        base: Any = importlib.import_module("cloudpickle").Pickler
    except ImportError:
        return None
    return type("_CloudPickler", (_Reductions, base), {})


class _Sink:
    """Takes the stream in Python code: the interpreter can switch threads at each write (64 KiB) of a long pickling."""

    def __init__(self) -> None:
        self.stream = bytearray()
        self.mentions_main = False

    def write(self, data: Any) -> int:
        # The pickler writes frames of about 64 KiB, and what is larger (the user's text and bytes) on its own: a look
        # at the frames finds every reference to a class, and does not hold the interpreter for a gigabyte of text.
        if isinstance(data, bytes) and len(data) <= _FRAME_LIMIT_BYTES and b"__main__" in data:
            self.mentions_main = True
        self.stream += data
        return memoryview(data).nbytes


def _dump(pickler: type[Any], value: Any) -> Pickled:
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of band (False), or leave it in the stream (True)."""
        try:
            raw = buffer.raw()
        except BufferError:  # neither C nor F contiguous
            return True
        if raw.nbytes < IN_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    sink = _Sink()
    instance = pickler(sink, protocol=5, buffer_callback=keep)
    instance._host_types = set()
    instance.dump(value)
    return Pickled(sink.stream, buffers, mentions_main=sink.mentions_main)


def _cannot(value: Any, error: Exception) -> NotSupported:
    kind = type(value)
    return NotSupported(
        f"{kind.__module__}.{kind.__qualname__} cannot be pickled ({type(error).__name__}: {error}); "
        "save what it was made from, or give it a __reduce__"
    )
