"""The N-th call to the operating system fails: SQLite's way of testing that no error path loses data."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Self

_BY_PATH = ("open", "mkdir", "chmod", "rename", "link", "unlink", "rmdir")
_BY_FD = ("write", "fsync", "fchmod", "pwrite", "close")
CALLS = _BY_PATH + _BY_FD


class FailingCalls:
    """Within the ``with``, calls of this thread on files below `directory` are counted, and one of them fails.

    Parameters
    ----------
    directory
        Other files are left alone.
    number
        The call that fails, counted from 1; 0: none, only count.
    error
        Its errno.
    for_ever
        Whether all later calls fail as well. ``close`` and ``unlink`` then still work: a process can always close a file,
        and a full disk can be emptied.
    names
        The calls that are counted.
    reads
        Whether opening a file or directory for reading counts too; a full disk can still be read.

    Attributes
    ----------
    seen
        Names and arguments of the calls that were counted.
    failed
        How many of them failed.
    """

    def __init__(
        self,
        directory: str,
        *,
        number: int = 0,
        error: int = 0,
        for_ever: bool = False,
        names: tuple[str, ...] = CALLS,
        reads: bool = True,
    ) -> None:
        self._directory = os.path.join(directory, "")
        self._number = number
        self._error = error
        self._for_ever = for_ever
        self._names = names
        self._reads = reads
        self._thread = threading.get_ident()
        self._fds: set[int] = set()
        self._originals: dict[str, Callable[..., Any]] = {}
        self.seen: list[tuple[str, Any]] = []
        self.failed = 0

    def __enter__(self) -> Self:
        for name in dict.fromkeys((*self._names, "open", "close")):
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrapped(name, self._originals[name]))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(first, *args, **kwargs)
            ours = first in self._fds if isinstance(first, int) else self._is_below(first, kwargs.get("dir_fd"))
            if ours and name in self._names and (self._reads or name != "open" or args[0] & os.O_ACCMODE):
                self.seen.append((name, first))
                if self._fails(name):
                    self.failed += 1
                    if name == "close":  # the descriptor is gone all the same
                        self._fds.discard(first)
                        original(first)
                    raise OSError(self._error, os.strerror(self._error), str(first))
            result = original(first, *args, **kwargs)
            if name == "open" and ours:
                self._fds.add(result)
            elif name == "close":
                self._fds.discard(first)
            return result

        return call

    def _is_below(self, path: Any, dir_fd: int | None) -> bool:
        if dir_fd is not None:
            return dir_fd in self._fds
        return os.path.join(os.fspath(path), "").startswith(self._directory)

    def _fails(self, name: str) -> bool:
        if not self._number:
            return False
        if self._for_ever:
            return len(self.seen) >= self._number and name not in ("close", "unlink")
        return len(self.seen) == self._number
