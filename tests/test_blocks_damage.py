"""Every flipped byte and every truncation is found before anything is decoded, and a row that lies is refused."""

from __future__ import annotations

import contextlib
import pickle
import struct
from typing import Any

import numpy as np
import pandas as pd
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from veloc_dask.storage import blocks, frames, pickles
from veloc_dask.storage.blocks import Encoded, ItemSpec, array_item, decode, encode, verify
from veloc_dask.storage.errors import IntegrityError, NotSupported

ITEM = ItemSpec("t", "blocks", (1,))
PADDED = ItemSpec("u", "array", (2, 1), (5, 3), (3, 3), '"<i2"')

SMALL: dict[str, tuple[Any, ItemSpec, tuple[int, ...]]] = {
    "array": (np.arange(9.0), array_item("u", ((9,),), "f8"), (0,)),
    "padded": (np.arange(6, dtype="<i2").reshape(2, 3), PADDED, (1, 0)),
    "ndarray": (np.arange(6).reshape(2, 3).T, ITEM, (0,)),
    "empty": (np.empty((0, 3)), ITEM, (0,)),
    "scalar": (np.float32(1), ITEM, (0,)),
    "pickle": ({"a": [1, 2]}, ITEM, (0,)),
    "buffers": ([np.arange(600), np.arange(700)], ITEM, (0,)),
    "arrow": (pd.DataFrame({"a": [1.5, 2.5]}), ITEM, (0,)),
    "bytes": (b"abc", ITEM, (0,)),
    "str": ("abc", ITEM, (0,)),
    "beside": (np.arange(3), array_item("u", ((9,),), "f8"), (0,)),
}


def with_trailer(data: bytes) -> bytearray:
    return bytearray(data) + crc32c(data).to_bytes(4, "little")


def row(encoded: Encoded, item: ItemSpec | None = None) -> dict[str, Any]:
    fields = {"object", "encoding", "dtype", "shape", "order", "nbytes", "stored_nbytes"}
    return {name: getattr(encoded, name) for name in fields} | {
        "crc32c": crc32c(b"".join(encoded.buffers())),
        "item": item,
        "allow_pickle": True,
    }


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be parsed, let alone unpickled, while the checksum is wrong."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("decoded before it was verified")

    monkeypatch.setattr(pickles, "loads", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(frames, "from_arrow", refuse)
    monkeypatch.setattr(blocks, "dtype_from_text", refuse)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("no_decoding")
def test_every_flipped_byte_is_found(name: str) -> None:
    value, item, index = SMALL[name]
    encoded = encode_before(value, item, index)
    fields = row(encoded, item)
    stored = with_trailer(b"".join(encoded.buffers()))
    for at in range(len(stored)):
        stored[at] ^= 1 << (at % 8)
        with pytest.raises(IntegrityError, match=r"^[tu]/[cx]/.*expected checksum [0-9a-f]{8}, (found|computed)"):
            decode(stored, **fields)
        stored[at] ^= 1 << (at % 8)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("no_decoding")
def test_every_truncation_is_found(name: str) -> None:
    value, item, index = SMALL[name]
    encoded = encode_before(value, item, index)
    fields = row(encoded, item)
    stored = with_trailer(b"".join(encoded.buffers()))
    for length in range(len(stored)):
        with pytest.raises(IntegrityError, match=rf"expected {len(stored)} bytes, found {length}"):
            decode(stored[:length], **fields)
    with pytest.raises(IntegrityError, match="found"):
        decode(stored + b"\0", **fields)


_ENCODED: dict[str, Encoded] = {
    name: encode(value, item, index, allow_pickle=True) for name, (value, item, index) in SMALL.items()
}


def encode_before(value: Any, item: ItemSpec, index: tuple[int, ...]) -> Encoded:
    """The encoding made at import: the fixture has broken the functions that it needs."""
    return next(_ENCODED[name] for name, entry in SMALL.items() if entry[0] is value and entry[1:] == (item, index))


def test_a_whole_but_different_block_is_found() -> None:
    one, two = (encode(np.full(4, n), ITEM, (0,), allow_pickle=False) for n in (1, 2))
    with pytest.raises(IntegrityError, match="expected checksum"):
        decode(with_trailer(b"".join(two.buffers())), **row(one))


def test_verify_alone() -> None:
    data = with_trailer(b"123456789")
    verify(data, object="t/c/0", stored_nbytes=13, crc32c=0xE3069283)
    verify(np.frombuffer(data, np.uint8), object="t/c/0", stored_nbytes=13, crc32c=0xE3069283)
    with pytest.raises(IntegrityError, match=r"t/c/0: expected checksum 00000001, found e3069283"):
        verify(data, object="t/c/0", stored_nbytes=13, crc32c=1)
    with pytest.raises(IntegrityError):
        verify(b"", object="t/c/0", stored_nbytes=0, crc32c=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("array", {"shape": (8,)}),
        ("array", {"shape": (-1,)}),
        ("array", {"nbytes": 64}),
        ("array", {"dtype": '"|O"'}),
        ("array", {"dtype": ""}),
        ("padded", {"item": None}),
        ("padded", {"shape": (4, 3)}),
        ("padded", {"shape": (2,)}),
        ("padded", {"nbytes": 13}),
        ("padded", {"dtype": '"<i4"'}),
        ("ndarray", {"order": ""}),
        ("ndarray", {"order": "A"}),
        ("ndarray", {"shape": (2**62, 2**62)}),
        ("ndarray", {"shape": (2.0, 3)}),
        ("ndarray", {"nbytes": 47}),
        ("scalar", {"dtype": '"<f8"'}),
        ("pickle", {"nbytes": 0}),
        ("bytes", {"nbytes": 12}),
        ("bytes", {"encoding": "arrow"}),
        ("bytes", {"encoding": "pickle"}),
        ("pickle", {"encoding": "arrow"}),
    ],
)
def test_a_row_that_lies_is_refused(name: str, change: dict[str, Any]) -> None:
    value, item, index = SMALL[name]
    encoded = encode(value, item, index, allow_pickle=True)
    fields = row(encoded, item)
    with pytest.raises(IntegrityError):
        decode(with_trailer(b"".join(encoded.buffers())), **(fields | change))


def test_an_unknown_encoding_is_named() -> None:
    encoded = encode(b"abc", ITEM, (0,), allow_pickle=False)
    with pytest.raises(NotSupported, match="zstd-delta"):
        decode(with_trailer(b"".join(encoded.buffers())), **(row(encoded) | {"encoding": "zstd-delta"}))


def decode_payload(payload: bytes, encoding: str, allow_pickle: bool = True) -> Any:
    """Decode a forged payload with a valid checksum."""
    data = struct.pack("<II", 1, len(payload)) + payload
    return decode(
        with_trailer(data),
        object="t/c/0",
        encoding=encoding,
        dtype="",
        shape=(),
        order="",
        nbytes=len(payload),
        stored_nbytes=len(data) + 4,
        crc32c=crc32c(data),
        allow_pickle=allow_pickle,
    )


def test_forged_pickle_containers_are_refused() -> None:
    stream = pickle.dumps([1])

    def container(entries: list[tuple[int, int]], stream_nbytes: int | None = None, tail: bytes = b"") -> bytes:
        head = struct.pack("<8sQQ", b"vd-pkl1\n", len(entries), len(stream) if stream_nbytes is None else stream_nbytes)
        return head + b"".join(struct.pack("<QQ", *e) for e in entries) + stream + tail

    assert decode_payload(container([]), "pickle") == [1]
    end = 24 + 16 + len(stream)
    for forged in [
        b"",
        container([])[:20],
        b"x" + container([])[1:],
        container([], 10**18),
        container([], 2**64 - 1),
        struct.pack("<8sQQ", b"vd-pkl1\n", 2**60, 0),
        container([(0, 8)]),
        container([(end, 1)]),
        container([(end + 64, 1)], tail=bytes(65)),
        container([(end, 2**63)], tail=bytes(8)),
        container([(end, 4)], tail=bytes(8)),
        container([], tail=b"\0"),
        container([(end + 16, 4), (end + 16 + 3, 4)], tail=bytes(8)),
    ]:
        with pytest.raises(IntegrityError, match="t/c/0"):
            decode_payload(forged, "pickle")


def test_a_pickle_that_does_not_load_here_is_named() -> None:
    gone = b"\x80\x05cno_such_module_at_all\nThing\n."
    container = struct.pack("<8sQQ", b"vd-pkl1\n", 0, len(gone)) + gone
    with pytest.raises(NotSupported, match="no_such_module_at_all"):
        decode_payload(container, "pickle")


@given(st.data())
@settings(max_examples=300, deadline=None, print_blob=True)
def test_forged_arrow_streams_do_no_harm(data: st.DataObject) -> None:
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": pd.Categorical(["x", None]), "c": ["p", "q"]})
    stream = bytearray().join(frames.to_arrow(frame))
    for at in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=3)):
        stream[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(IntegrityError, NotSupported):
        decode_payload(bytes(stream), "arrow", allow_pickle=False)
