"""A function in a child process that can be killed, stopped and continued.

The child is a fork, so that it starts in a millisecond and sees what the test has prepared (armed fault points, open tiers).
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Self

DEADLINE_S = 30.0


class Child:
    """Runs ``function(*args)`` in a fork; use it in a ``with``, so that it never outlives the test."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            # threads of the test runner do nothing that the child needs
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            self._run(write, function, args)
        os.close(write)
        self._status: int | None = None

    @staticmethod
    def _run(write: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        code = 1
        try:
            reply = pickle.dumps(function(*args))
            with os.fdopen(write, "wb") as file:
                file.write(reply)
            code = 0
        except BaseException:  # noqa: BLE001  # nothing may get back into the test runner's copy of the stack
            traceback.print_exc()
        finally:
            os._exit(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is None:
            self.kill()
        os.close(self._read)

    def _wait(self, options: int, what: str) -> int:
        end = time.monotonic() + DEADLINE_S
        while True:
            pid, status = os.waitpid(self.pid, options | os.WNOHANG)
            if pid:
                return status
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} did not {what} within {DEADLINE_S:g} s")
            time.sleep(0.001)

    def exit_code(self) -> int:
        """Wait for the end; the negative number of the signal if one has ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._wait(0, "end"))
        return self._status

    def result(self) -> Any:
        """Wait for the end; what the function has returned. It must be small."""
        code = self.exit_code()
        if code:
            raise RuntimeError(f"process {self.pid} ended with {code}; its traceback is on stderr")
        data = b"".join(iter(lambda: os.read(self._read, 1 << 16), b""))
        return pickle.loads(data)

    def wait_until_stopped(self) -> None:
        status = self._wait(os.WUNTRACED, "stop")
        if not os.WIFSTOPPED(status):
            self._status = os.waitstatus_to_exitcode(status)
            raise RuntimeError(f"process {self.pid} ended with {self._status} instead of stopping")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.exit_code()
