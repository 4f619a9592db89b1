"""A block goes out: encoded, placed, written and checksummed in one pass over the worker's own memory.

The checksum is computed piece by piece just before each piece is written, while it is in the CPU's cache; a block whose tier
fails midway is written again, from its beginning, to the next one. When no local tier can take it, it goes straight to the
remote tier.
"""

from __future__ import annotations

import logging
import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import crc32c
import msgspec

from veloc_dask.storage import blocks
from veloc_dask.storage.errors import TierError
from veloc_dask.storage.placement import Policy, hybrid_naive
from veloc_dask.storage.remote import Remote, retried
from veloc_dask.storage.table import Row
from veloc_dask.storage.tiers import Node, block_path

logger = logging.getLogger("veloc_dask")

_PIECE = 1 << 21  # about what a core's cache holds
_WAIT_S = 0.2
_RACES = 5  # how often room that another process may have left is asked for again
_RACE_S = 0.002


class Stored(msgspec.Struct, frozen=True):
    """Where a block went."""

    row: Row
    node: str  # uuid, "" if it went straight to the remote tier


class FrozenBlock(msgspec.Struct, frozen=True):
    """A block that was encoded elsewhere (a plain object, by the client at ``save()``), ready to be written."""

    object: str
    encoding: str
    dtype: str
    shape: tuple[int, ...]
    order: str
    nbytes: int
    stored_nbytes: int
    data: bytes  # the file without its checksum

    def buffers(self) -> Iterator[bytes]:
        yield self.data


def freeze(value: Any, spec: blocks.ItemSpec, *, allow_pickle: bool) -> FrozenBlock:
    """Encode a plain object now, so that later changes to it do no harm."""
    encoded = blocks.encode(value, spec, (), allow_pickle=allow_pickle)
    return FrozenBlock(
        encoded.object,
        encoded.encoding,
        encoded.dtype,
        encoded.shape,
        encoded.order,
        encoded.nbytes,
        encoded.stored_nbytes,
        b"".join(encoded.buffers()),
    )


class _Sealed:
    """The bytes of a block's file, its checksum computed on the way and appended."""

    def __init__(self, encoded: blocks.Encoded | FrozenBlock) -> None:
        self._encoded = encoded
        self.crc32c = 0

    def __iter__(self) -> Iterator[Any]:
        crc = 0
        for buffer in self._encoded.buffers():
            view = memoryview(buffer)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                crc = crc32c.crc32c(piece, crc)
                yield piece
        self.crc32c = crc
        yield struct.pack("<I", crc)


class Writer:
    """Writes the blocks of one checkpoint name from this process; used by several threads."""

    def __init__(self, name: str, node: Node, remote: Remote | None, policy: Policy = hybrid_naive) -> None:
        self._name = name
        self._node = node
        self._remote = remote
        self._policy = policy
        self._placing = threading.Lock()

    def store(
        self,
        value: Any,
        spec: blocks.ItemSpec,
        index: tuple[int, ...],
        directory: str,
        *,
        allow_pickle: bool,
        direct: bool = True,
    ) -> Stored:
        """Encode and write one block; with `direct` to the remote tier if no local one takes it.

        Raises
        ------
        NotSupported
            The value cannot be saved, or only with pickle and that is not allowed.
        TierError
            No tier took it; the message says why, tier by tier.
        """
        encoded = (
            value if isinstance(value, FrozenBlock) else blocks.encode(value, spec, index, allow_pickle=allow_pickle)
        )
        path = block_path(self._name, directory, encoded.object)
        sealed = _Sealed(encoded)
        failures: list[str] = []
        node = self._node.uuid
        if not self._store_local(path, sealed, encoded.stored_nbytes, failures):
            self._store_remote(path, sealed, failures, direct)
            node = ""
        row = Row(
            spec.path,
            index,
            encoded.object,
            0,
            encoded.stored_nbytes,
            encoded.nbytes,
            encoded.dtype,
            encoded.shape,
            encoded.order,
            encoded.encoding,
            "",
            sealed.crc32c,
            "",
        )
        return Stored(row, node)

    def _store_local(self, path: str, sealed: _Sealed, nbytes: int, failures: list[str]) -> bool:
        tiers = self._node.tiers
        tried: set[int] = set()
        races = 0
        while True:
            reserved = False
            with self._placing:  # so that two threads do not both take the last room
                devices = [t.device() for t in tiers]
                devices = [
                    msgspec.structs.replace(d, usable=d.usable and i not in tried) for i, d in enumerate(devices)
                ]
                choice = self._policy(nbytes, devices)
                if choice.device is not None:
                    try:
                        reserved = tiers[choice.device].try_reserve(nbytes)
                    except OSError as error:
                        failures.append(f"tier {tiers[choice.device].path}: {error}")
                        tried.add(choice.device)
                        continue
            if choice.wait:
                threading.Event().wait(_WAIT_S)
                continue
            if not reserved and (races or choice.device is not None):
                # another process was about to take the same room, and may leave it again just as we do now
                races += 1
                if races <= _RACES:
                    threading.Event().wait(random.uniform(0, _RACE_S * 2**races))
                    continue
                if choice.device is not None:
                    failures.append(f"tier {tiers[choice.device].path}: other processes took the room")
                    tried.add(choice.device)
                    continue
            if choice.device is None:
                failures.extend(
                    f"tier {d.name}: {d.used_nbytes:,} of {d.capacity_nbytes:,} bytes used, {nbytes:,} needed"
                    if not (trouble := tiers[i].trouble)
                    else f"tier {d.name}: set aside after an error: {trouble}"
                    for i, d in enumerate(devices)
                    if i not in tried
                )
                return False
            tier = tiers[choice.device]
            try:
                tier.write(path, sealed, nbytes, reserved=True)
            except OSError as error:
                failures.append(f"tier {tier.path}: {error}")
                tried.add(choice.device)
            else:
                return True

    def _store_remote(self, path: str, sealed: _Sealed, failures: list[str], direct: bool) -> None:
        remote = self._remote
        if remote is not None and direct:
            try:
                retried(lambda: remote.put(path, sealed), f"remote {remote.label}")
            except OSError as error:
                failures.append(str(error))
            else:
                return
        raise TierError("no tier took the block: " + "; ".join(failures or ["none is configured"]))
