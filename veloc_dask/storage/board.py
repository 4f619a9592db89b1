"""How many bytes the processes of one node hold on one tier, shared without locks.

Each process owns one small file, its slot, in the tier's ``board`` directory: it alone writes it, everybody reads all of
them. ``written`` and ``freed`` only grow and stay valid after their process died (its files are still there); what a killed
process had reserved stays on the books as well, since its files may be complete or half written. A process that finds
nobody else alive measures the disk and starts the books anew. The sum is never below what the files hold: a process
announces a reservation first and looks at those of the others then, so of two that compete at least one sees both.

Slots are written with write calls, not through a memory map: on a full tmpfs the first touch of a page would kill the
process. They are not kept open: that would keep an operator from making the file system read-only.
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
        self.reserved = self.written = self.freed = 0
        self._cache: tuple[float, int, int] = (-1.0, 0, 0)
        try:
            self._publish()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        others = self._others()
        if any(reserved for *_, reserved in others):
            self.freed += files.remove_temporary(data)
        if not any(alive for _, alive, _, _ in others):
            # first the sum, then the slots that it replaces: too much for a moment, never too little
            self.written, self.freed = sum(n for _, n in files.sizes(data)), 0
            with contextlib.suppress(OSError):  # as above: a refusal ends here
                self._publish()
                for path, *_ in others:
                    os.unlink(path)

    def _publish(self) -> None:
        """Write the slot; OSError if the tier does not take even that."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        new = False
        try:
            fd = os.open(self._path, flags)
        except FileNotFoundError:  # new, or somebody who cannot see this process has taken it for dead
            fd = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            new = True
        try:
            if new:
                os.fchmod(fd, 0o600)
            packed = _SLOT.pack(_MAGIC, self._pid, self._start, self.reserved, self.written, self.freed)
            if os.pwrite(fd, packed, 0) != _SLOT.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        finally:
            os.close(fd)

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
            self._announce(nbytes)

    def _announce(self, nbytes: int) -> None:
        self.reserved += nbytes
        try:
            self._publish()
        except BaseException:
            self.reserved -= nbytes
            raise

    def try_reserve(self, nbytes: int, capacity_nbytes: int) -> bool:
        """Announce a write if all processes together stay within the capacity; whether they do.

        Of two processes that compete for the last room, both may be refused: try again after a moment.
        """
        with self._lock:
            self._announce(nbytes)
            if sum(self._sum(max_age_s=0)) <= capacity_nbytes:
                return True
            self._change(reserved=-nbytes)
            return False

    def _change(self, *, reserved: int = 0, written: int = 0, freed: int = 0) -> None:
        self.reserved += reserved
        self.written += written
        self.freed += freed
        with contextlib.suppress(OSError):  # others see it later; until then they see too many bytes, not too few
            self._publish()

    def settle(self, reserved: int, written: int) -> None:
        """A write ended: its reservation becomes `written` bytes (0 if it failed)."""
        with self._lock:
            self._change(reserved=-reserved, written=written)

    def free(self, nbytes: int) -> None:
        with self._lock:
            self._change(freed=nbytes)

    def close(self) -> None:
        """Give the slot back. What this process wrote stays on the books for as long as others live."""
        with self._lock:
            self._pid = 0
            self._change()
