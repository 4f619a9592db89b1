"""What can happen at a fault point, and how a test asks for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from veloc_dask.storage import faults

Action = Callable[..., None]


@contextmanager
def arm(name: str, action: Action) -> Iterator[None]:
    """Run `action` whenever the point is passed, in this process and in children that are forked meanwhile."""
    if name not in faults.POINTS:
        raise KeyError(f"there is no fault point {name!r}; known are {', '.join(faults.POINTS)}")
    if name in faults.armed:
        raise RuntimeError(f"fault point {name!r} is armed already")
    faults.armed[name] = action
    try:
        yield
    finally:
        del faults.armed[name]


def kill(**context: Any) -> None:
    """Die at once, as if the machine had lost this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(**context: Any) -> None:
    """Stand still until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(error: int) -> Action:
    """Raise OSError with this errno."""

    def action(**context: Any) -> None:
        raise OSError(error, os.strerror(error))

    return action


def delay(seconds: float) -> Action:
    def action(**context: Any) -> None:
        time.sleep(seconds)

    return action


def torn(nbytes: int) -> Action:
    """Keep only a prefix of the file that is being written, as a disk that lost power does."""

    def action(*, temporary: str, **context: Any) -> None:
        os.truncate(temporary, min(nbytes, os.stat(temporary).st_size))

    return action


def on_call(number: int, action: Action) -> Action:
    """`action` at the number-th passage only, counted from 1."""
    passed = 0

    def counted(**context: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            action(**context)

    return counted


def on_path(part: str, action: Action) -> Action:
    """`action` only for files whose final path contains `part`."""

    def chosen(*, path: str = "", **context: Any) -> None:
        if part in path:
            action(path=path, **context)

    return chosen
