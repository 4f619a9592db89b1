"""Capture and flush on one worker: blocks go from its memory to its node's tiers, and from there to the remote tier.

The event loop only looks values up and passes references; the work is done by two capture and two flush threads at low CPU
priority, so that they take what the computation leaves. Capture is bounded in bytes in flight, since a reference that we hold
keeps a value in memory; a paused worker is left alone. What was captured is flushed in the order in which it was captured.
Everything that happens is reported to the scheduler, a few milliseconds' worth in one message.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from distributed.core import Status as WorkerStatus

from veloc_dask.scheduler_plugin import internals, messages
from veloc_dask.scheduler_plugin.internals import Key
from veloc_dask.scheduler_plugin.worker_space import WorkerSpace
from veloc_dask.storage import reader, table
from veloc_dask.storage.blocks import ItemSpec
from veloc_dask.storage.remote import retried
from veloc_dask.storage.tiers import block_path
from veloc_dask.storage.writer import FrozenBlock, Stored

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("veloc_dask")

CAPTURE_THREADS = 2
FLUSH_THREADS = 2
IN_FLIGHT_NBYTES = 256 << 20
FLUSH_BATCH = 32  # small files that share one synchronisation of their directories
FLUSH_BATCH_NBYTES = 64 << 20
REPORT_S = 0.01
PAUSED_S = 0.5
_KINDS = {"veloc-captured": ("blocks", "failed", "missing"), "veloc-flushed": ("blocks", "failed")}


class Order(NamedTuple):
    """One block to capture."""

    space: WorkerSpace
    save: str
    directory: str
    number: int
    key: Key
    spec: ItemSpec
    at: tuple[int, ...]  # position in the item's grid of blocks
    plain: bytes | None  # an encoded FrozenBlock instead of a key
    flush: bool


class FlushOrder(NamedTuple):
    """One captured block to copy to the remote tier."""

    space: WorkerSpace
    save: str
    directory: str
    number: int
    row: table.Row


class _Attempt:
    """A version that this worker has to do with: how many threads are busy with it, and whether it was given up."""

    def __init__(self) -> None:
        self.busy = 0
        self.aborted = False
        self.clean: dict[str, bool] = {}  # what to remove once nobody is busy


def _low_priority() -> None:
    if hasattr(os, "setpriority"):
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # Linux: of this thread alone
        except OSError as error:
            logger.debug("this thread keeps its priority: %s", error)


class Pipeline:
    """See the module. All methods but those that run in threads (static ones) belong to the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._captures: deque[Order] = deque()
        self._flushes: deque[FlushOrder] = deque()
        self._attempts: dict[str, _Attempt] = {}
        self._capturing = self._flushing = self._in_flight_nbytes = 0
        self._reports: dict[tuple[str, str, str], dict[str, list[Any]]] = {}
        self._resuming = False  # the worker is paused, and a timer runs
        self._closed = False
        self._capture_pool = ThreadPoolExecutor(CAPTURE_THREADS, "veloc-capture", initializer=_low_priority)
        self._flush_pool = ThreadPoolExecutor(FLUSH_THREADS, "veloc-flush", initializer=_low_priority)

    def close(self) -> None:
        self._closed = True
        self._captures.clear()
        self._flushes.clear()
        self._capture_pool.shutdown(wait=False, cancel_futures=True)
        self._flush_pool.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, directory: str) -> _Attempt:
        return self._attempts.setdefault(directory, _Attempt())

    # -- capture ----------------------------------------------------------------------------------------------------

    def capture(self, orders: Collection[Order]) -> None:
        self._captures.extend(orders)
        self._start_captures()

    def _start_captures(self) -> None:
        while self._captures and self._capturing < 2 * CAPTURE_THREADS and not self._closed:
            order = self._captures[0]
            if order.plain is not None:
                nbytes = len(order.plain)
            elif self._worker.status == WorkerStatus.paused:
                if not self._resuming:
                    self._resuming = True
                    self._worker.loop.call_later(PAUSED_S, self._resume_captures)
                return
            else:
                task = self._worker.state.tasks.get(order.key)
                nbytes = int(task.nbytes or 0) if task is not None else 0
            if self._in_flight_nbytes and self._in_flight_nbytes + nbytes > IN_FLIGHT_NBYTES:
                return
            self._captures.popleft()
            attempt = self._attempt(order.directory)
            if attempt.aborted:
                continue
            try:
                value = (
                    internals.peek(self._worker, order.key)
                    if order.plain is None
                    else messages.decode(order.plain, FrozenBlock)
                )
            except (KeyError, OSError):  # it has moved on since the order, or its spill file has
                self._report("veloc-captured", order.space, order.save, "missing", order.number)
                continue
            self._capturing += 1
            self._in_flight_nbytes += nbytes
            attempt.busy += 1
            future = self._capture_pool.submit(self._capture, order, [value])
            del value  # the thread has the only reference of ours, and drops it when it is done
            self._when_done(future, self._captured, order, nbytes)

    def _resume_captures(self) -> None:
        self._resuming = False
        self._start_captures()

    @staticmethod
    def _capture(order: Order, holder: list[Any]) -> Stored:
        value = holder.pop()
        order.space.own(order.directory)
        if isinstance(value, internals.Spilled):
            value = value.load()
        allow_pickle = order.space.config.allow_pickle
        return order.space.writer.store(
            value, order.spec, order.at, order.directory, allow_pickle=allow_pickle, direct=order.flush
        )

    def _captured(self, order: Order, nbytes: int, future: Future[Stored]) -> None:
        self._capturing -= 1
        self._in_flight_nbytes -= nbytes
        error = future.exception()
        if error is not None:
            entry: Any = (order.number, messages.describe_error(error))
            self._report("veloc-captured", order.space, order.save, "failed", entry)
        else:
            stored = future.result()
            entry = (order.number, table.encode_row(stored.row), stored.node, stored.row.stored_nbytes)
            self._report("veloc-captured", order.space, order.save, "blocks", entry)
            if order.flush and stored.node:
                self._flushes.append(FlushOrder(*order[:4], stored.row))
        self._not_busy(order.space, order.directory)
        self._start_captures()
        self._start_flushes()

    # -- flush ------------------------------------------------------------------------------------------------------

    def flush(self, orders: Collection[FlushOrder]) -> None:
        self._flushes.extend(orders)
        self._start_flushes()

    def _start_flushes(self) -> None:
        while self._flushes and self._flushing < FLUSH_THREADS and not self._closed:
            batch = [self._flushes.popleft()]
            first, nbytes = batch[0], batch[0].row.stored_nbytes
            while self._flushes and len(batch) < FLUSH_BATCH and nbytes < FLUSH_BATCH_NBYTES:
                if self._flushes[0].directory != first.directory or self._flushes[0].space is not first.space:
                    break
                batch.append(self._flushes.popleft())
                nbytes += batch[-1].row.stored_nbytes
            attempt = self._attempt(first.directory)
            if attempt.aborted:
                continue
            attempt.busy += 1
            self._flushing += 1
            self._when_done(self._flush_pool.submit(self._flush, batch), self._flushed, batch)

    @staticmethod
    def _flush(batch: Sequence[FlushOrder]) -> None:
        """Copy blocks from this node's tiers to the remote one; each is verified on the way."""
        space, directory = batch[0].space, batch[0].directory

        def copy() -> None:
            objects = []
            for order in batch:
                copies = reader.local_copies(space.node, space.name, directory, order.row)
                stored = reader.read_verified(order.row, copies, what=f"flush of {directory}")
                objects.append((block_path(space.name, directory, order.row.object), [stored]))
            space.remote.put_many(objects)

        retried(copy, f"flush to {space.remote.label}")

    def _flushed(self, batch: Sequence[FlushOrder], future: Future[None]) -> None:
        self._flushing -= 1
        first = batch[0]
        error = future.exception()
        if error is not None:
            entry = (first.number, messages.describe_error(error))
            self._report("veloc-flushed", first.space, first.save, "failed", entry)
        else:
            for order in batch:
                done = (order.number, order.row.stored_nbytes)
                self._report("veloc-flushed", order.space, order.save, "blocks", done)
        self._not_busy(first.space, first.directory)
        self._start_flushes()

    # -- giving up --------------------------------------------------------------------------------------------------

    def abort(self, space: WorkerSpace, directory: str, *, local: bool, remote: bool) -> None:
        """A version failed: stop working on it, and delete what it left on this node and on the remote tier."""
        attempt = self._attempt(directory)
        attempt.aborted = True
        attempt.clean = {"local": local, "remote": remote}
        self._captures = deque(o for o in self._captures if o.directory != directory)
        self._flushes = deque(o for o in self._flushes if o.directory != directory)
        attempt.busy += 1
        self._not_busy(space, directory)

    def _not_busy(self, space: WorkerSpace, directory: str) -> None:
        attempt = self._attempt(directory)
        attempt.busy -= 1
        if attempt.busy == 0:
            if attempt.aborted:
                self._flush_pool.submit(functools.partial(space.clean, directory, **attempt.clean))
            else:  # given up ones are remembered: a late order must not revive them
                del self._attempts[directory]

    # -- from threads to the loop, and on to the scheduler ----------------------------------------------------------

    def _when_done(self, future: Future[Any], function: Callable[..., None], *args: Any) -> None:
        def done(future: Future[Any]) -> None:
            if not self._closed and not future.cancelled():
                self._worker.loop.add_callback(self._guarded, functools.partial(function, *args, future))

        future.add_done_callback(done)

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            logger.exception("veloc_dask: the end of a capture or flush could not be handled; the worker goes on")

    def _report(self, op: str, space: WorkerSpace, save: str, kind: str, entry: Any) -> None:
        if not self._reports:
            self._worker.loop.call_later(REPORT_S, self._send_reports)
        message = self._reports.setdefault((op, space.name, save), {k: [] for k in _KINDS[op]})
        message[kind].append(entry)

    def _send_reports(self) -> None:
        reports, self._reports = self._reports, {}
        # in this order: what was captured before what was flushed
        for (op, name, save), message in sorted(reports.items(), key=lambda r: r[0]):
            self._worker.batched_send({"op": op, "name": name, "save": save, **message})
