"""How many bytes the processes of one node hold on one tier, shared without locks.

Each process owns one small memory-mapped file in the tier's ``board`` directory: it alone writes it, everybody reads all of
them. ``written`` and ``freed`` only grow and stay valid after their process died (its files are still there); ``reserved``
(a write under way) counts only while its process lives. A process that finds nobody else alive measures the disk and starts
the books anew, so what a killed process left half done is forgotten no later than that.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import uuid

from veloc_dask.storage import files

_SLOT = struct.Struct("<8sqQqqq")  # magic, pid, process start, reserved, written, freed
_MAGIC = b"VELOCBD1"


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (pids are used again); 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return 0
    except (OSError, ValueError, IndexError):
        return 0
    try:  # no /proc (macOS): a living process is taken for the same one
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    return 1


class Board:
    """This process' slot on a tier's board, and the sum over all slots.

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
        self.reserved = self.written = self.freed = 0
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _SLOT.size)
            self._map = mmap.mmap(fd, _SLOT.size)
        finally:
            os.close(fd)
        self._publish()
        self._cache: tuple[float, int] = (-1.0, 0)
        if not any(alive for path, _, alive in self._others()):
            for path, _, _ in self._others():
                os.unlink(path)
            self.written = sum(n for _, n in files.sizes(data))
            self._publish()

    def _publish(self) -> None:
        if not self._map.closed:
            self._map[:] = _SLOT.pack(_MAGIC, self._pid, self._start, self.reserved, self.written, self.freed)

    def _others(self) -> list[tuple[str, int, bool]]:
        """Path, bytes held and liveness of each other slot."""
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
                slots.append((entry.path, written - freed + (reserved if alive else 0), alive))
        return slots

    def used_nbytes(self, max_age_s: float = 0.05) -> int:
        """Bytes held on the tier by all processes of the node, writes under way included."""
        with self._lock:
            now = time.monotonic()
            if now - self._cache[0] > max_age_s or self._cache[0] < 0:
                self._cache = (now, sum(n for _, n, _ in self._others()))
            return max(0, self._cache[1] + self.reserved + self.written - self.freed)

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            self.reserved += nbytes
            self._publish()

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
            if not self._map.closed:
                self._pid = 0
                self.reserved = 0
                self._publish()
                self._map.close()
