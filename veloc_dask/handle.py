"""What `Checkpointer.save` returns: how far a save has come, and waiting for it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from veloc_dask.errors import ConfigError, VelocError
from veloc_dask.scheduler_plugin.messages import Status, rebuild_error

if TYPE_CHECKING:
    from veloc_dask.checkpointer import Checkpointer

logger = logging.getLogger("veloc_dask")

LEVELS = ("pending", "local", "protected", "durable")


class SaveHandle:
    """A save under way.

    Attributes
    ----------
    value
        What was saved, with lazy collections persisted. Go on from it: nothing in it is computed again.
    version : int
        The number of the version.

    Examples
    --------
    >>> import dask.array as da
    >>> from distributed import Client
    >>> import tempfile, veloc_dask as vd
    >>> client = Client(processes=False, dashboard_address=None)
    >>> where = tempfile.mkdtemp()
    >>> ck = vd.Checkpointer(client, "demo", local=where, remote=where + "/remote")
    >>> h = ck.save({"x": da.ones(4, chunks=2)})
    >>> h.wait("durable")
    >>> h.level
    'durable'
    >>> ck.close(); client.close()
    """

    def __init__(self, checkpointer: Checkpointer, save_id: str, version: int, value: Any, *, process: str) -> None:
        self._checkpointer = checkpointer
        self._id = save_id
        self.version = version
        self.value = value
        self._status = Status(save_id, version, "pending", False)
        self._error: VelocError | None = None
        self._logged_here = process == f"{socket.gethostname()}:{os.getpid()}"  # the scheduler logs failures
        self._changed = asyncio.Event()
        self._callbacks: list[tuple[str, Callable[[SaveHandle], Any]]] = []

    @property
    def level(self) -> str:
        """The level reached: "pending", "local", "protected" or "durable"."""
        return self._status.level

    @property
    def error(self) -> VelocError | None:
        """What the save failed with, None if it has not failed. A level that was reached before still holds."""
        return self._error

    @property
    def done(self) -> bool:
        """Whether nothing more will happen: the highest level is reached, or the save has failed."""
        return self._status.done

    def progress(self) -> dict[str, int]:
        """Blocks and bytes so far: of how many blocks, captured to node-local tiers, flushed to the remote tier."""
        s = self._status
        return {
            "blocks": s.nblocks,
            "captured": s.captured,
            "flushed": s.flushed,
            "captured_nbytes": s.nbytes,
            "flushed_nbytes": s.flushed_nbytes,
        }

    def wait(self, level: str = "durable", timeout: float | None = None) -> Any:
        """Block until the version has reached a level; a coroutine with an asynchronous client.

        Parameters
        ----------
        level
            "local", "protected" or "durable"; a higher level includes the lower ones.
        timeout
            Seconds; None waits for ever.

        Raises
        ------
        VelocError
            The save failed before it reached the level; the error says why.
        TimeoutError
            The time is over. The save goes on.
        ConfigError
            The checkpointer cannot reach that level (no remote tier).
        """
        if level not in LEVELS[1:]:
            raise ConfigError(f"level {level!r}: expected 'local', 'protected' or 'durable'")
        if level != "local" and self._checkpointer.remote is None:
            raise ConfigError(
                f"level {level!r} cannot be reached: the checkpointer has no remote tier; pass remote=, or wait for 'local'"
            )
        return self._checkpointer._sync(self._wait, level, timeout)

    async def _wait(self, level: str, timeout: float | None) -> None:
        try:
            async with asyncio.timeout(timeout):
                while not self._reached(level):
                    if self._error is not None:
                        raise self._error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"version {self.version} of {self._checkpointer.name!r} is not {level} after {timeout:g} s, it is "
                f"{self.level}; it goes on"
            ) from None

    def _reached(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)

    def add_done_callback(self, level: str, fn: Callable[[SaveHandle], Any]) -> None:
        """Call ``fn(handle)`` once the level is reached or the save has failed (see `error`).

        It is called on the client's event loop and must not block; if that is so already, it is called at once.
        """
        if level not in LEVELS[1:]:
            raise ConfigError(f"level {level!r}: expected 'local', 'protected' or 'durable'")
        self._callbacks.append((level, fn))
        self._checkpointer._loop_call(self._run_callbacks)

    def _run_callbacks(self) -> None:
        ready = [c for c in self._callbacks if self._reached(c[0]) or self._status.done or self._error is not None]
        self._callbacks = [c for c in self._callbacks if c not in ready]
        for _, fn in ready:
            try:
                fn(self)
            except Exception:
                logger.exception("a callback of version %s raised", self.version)

    def _update(self, status: Status) -> None:
        self._status = status
        if status.error is not None and self._error is None:
            self._fail(rebuild_error(status.error))
        self._changed.set()
        self._run_callbacks()

    def _fail(self, error: VelocError) -> None:
        self._error = error
        if not self._logged_here and self._checkpointer.client.status == "running":
            name = self._checkpointer.name
            logger.warning("version %s of %s failed after level %s: %s", self.version, name, self.level, error)
        self._checkpointer._failed(error)
        self._changed.set()
        self._run_callbacks()

    def __repr__(self) -> str:
        p = self.progress()
        state = f"failed: {self._error}" if self._error is not None else self.level
        done = f"{p['captured']}/{p['blocks']} blocks captured"
        return f"<SaveHandle {self._checkpointer.name!r} version {self.version}: {state}, {done}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(repr(self))}</pre>"
