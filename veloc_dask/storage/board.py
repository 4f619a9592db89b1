"""How many bytes the processes of one node hold on one tier, shared without locks.

Each process owns one small file, its slot, in the tier's ``board`` directory: it alone writes it, everybody reads all of
them. ``written`` and ``freed`` only grow and stay valid after their process died (its files are still there); what a killed
process had reserved stays on the books as well, since its files may be complete or half written. A process that finds
nobody else alive measures the disk and starts the books anew. The sum is never below what the files hold: a process
announces a reservation first and looks at those of the others then, so of two that compete at least one sees both.

Slots are written with pwrite, not through a memory map: on a full tmpfs the first touch of a page would kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
import time
import uuid

from veloc_dask.storage import files
from veloc_dask.storage.processes import process_start

__all__ = ["Board", "process_start"]

_SLOT = struct.Struct("<8sqQqqq")  # magic, pid, process start, reserved, written, freed
_MAGIC = b"VELOCBD1"
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Board:
    """This process' slot on a tier's board, and the sum over all slots.

    On a full or read-only tier the slot may be impossible to create; then nothing can be reserved, each attempt tries again.

    Parameters
    ----------
    directory
        The board's directory (private, existing).
    data
        The directory whose files the board accounts for; measured when nobody else is alive.
    """

    def __init__(self, directory: str, data: str) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._start = process_start(self._pid)
        self._path = os.path.join(directory, f"{self._pid}-{uuid.uuid4().hex}.slot")
        self._fd = -1
        self._closed = False
        self.reserved = self.written = self.freed = 0
        self._cache: tuple[float, int, int] = (-1.0, 0, 0)
        try:
            self._open()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        others = self._others()
        if any(reserved for *_, reserved in others):
            self.freed += files.remove_temporary(data)
        if not any(alive for _, alive, _, _ in others):
            # first the sum, then the slots that it replaces: too much for a moment, never too little
            self.written, self.freed = sum(n for _, n in files.sizes(data)), 0
            self._publish()
            for path, *_ in others:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        else:
            self._publish()

    def _open(self) -> None:
        if self._fd >= 0 or self._closed:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.pwrite(fd, self._packed(), 0)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            raise
        self._fd = fd

    def _packed(self) -> bytes:
        return _SLOT.pack(_MAGIC, self._pid, self._start, self.reserved, self.written, self.freed)

    def _publish(self) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, self._packed(), 0)

    def _others(self) -> list[tuple[str, bool, int, int]]:
        """Path, liveness, bytes held and bytes reserved of each other slot."""
        slots = []
        for entry in os.scandir(self.directory):
            if not entry.name.endswith(".slot") or entry.path == self._path:
                continue
            try:
                raw = files.read(entry.path, limit=_SLOT.size).tobytes()
                magic, pid, start, reserved, written, freed = _SLOT.unpack(raw)
            except (OSError, struct.error):
                continue  # being created or removed at this moment
            if magic == _MAGIC:
                alive = pid != 0 and process_start(pid) == start != 0
                slots.append((entry.path, alive, written - freed, reserved))
        return slots

    def _sum(self, max_age_s: float) -> tuple[int, int]:
        now = time.monotonic()
        if now - self._cache[0] > max_age_s or self._cache[0] < 0:
            others = self._others()
            self._cache = (now, sum(n for *_, n, _ in others), sum(n for *_, n in others))
        _, held, reserved = self._cache
        return max(0, held + self.written - self.freed), reserved + self.reserved

    def used_nbytes(self, max_age_s: float = 0.05) -> int:
        """Bytes held on the tier by all processes of the node, writes under way included."""
        with self._lock:
            return sum(self._sum(max_age_s))

    def pending_nbytes(self, max_age_s: float = 0.05) -> int:
        """The part of `used_nbytes` that is reserved: the file system may not know of it yet."""
        with self._lock:
            return self._sum(max_age_s)[1]

    def reserve(self, nbytes: int) -> None:
        """Announce a write, whatever the capacity. OSError: the tier refuses even that."""
        with self._lock:
            self._open()
            self.reserved += nbytes
            self._publish()

    def try_reserve(self, nbytes: int, capacity_nbytes: int) -> bool:
        """Announce a write if all processes together stay within the capacity; whether they do.

        Of two processes that compete for the last room, both may be refused: try again after a moment.
        """
        with self._lock:
            self._open()
            self.reserved += nbytes
            self._publish()
            if sum(self._sum(max_age_s=0)) <= capacity_nbytes:
                return True
            self.reserved -= nbytes
            self._publish()
            return False

    def settle(self, reserved: int, written: int) -> None:
        """A write ended: its reservation becomes `written` bytes (0 if it failed)."""
        with self._lock:
            self.reserved -= reserved
            self.written += written
            self._publish()

    def free(self, nbytes: int) -> None:
        with self._lock:
            self.freed += nbytes
            self._publish()

    def close(self) -> None:
        """Give the slot back. What this process wrote stays on the books for as long as others live."""
        with self._lock:
            self._closed = True
            if self._fd >= 0:
                self._pid = 0
                self.reserved = 0
                self._publish()
                os.close(self._fd)
                self._fd = -1
