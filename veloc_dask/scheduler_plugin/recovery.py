"""A lost block comes back: a loader instead of its lineage, and the lineage again if no copy can be read.

Lives on the scheduler and is driven by its transition hook, so each step takes microseconds and none does I/O. A key that
has a snapshot and leaves memory although somebody still wants it gets a loader; while the loader stands in, the original
lineage is kept (see `internals.Lineage`). It is put back as soon as the key is in memory again, or at the first sign that the
loader cannot do it: it said that no copy is readable, or two workers died under it. Data without a lineage (scattered) is
armed as soon as it has a snapshot, since Dask forgets such a key at once when its worker dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from veloc_dask.scheduler_plugin import internals
from veloc_dask.scheduler_plugin.internals import Key, Lineage
from veloc_dask.storage.reader import BlockRef

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState

logger = logging.getLogger("veloc_dask")

MAX_LOADER_DEATHS = 1  # a worker's death under a loader may have been its fault: the second time Dask computes


class _Standing:
    """A loader that stands in for a task at the moment."""

    __slots__ = ("deaths", "lineage")

    def __init__(self, lineage: Lineage | None) -> None:
        self.lineage = lineage
        self.deaths = 0


class Recovery:
    """Which keys have snapshots, and which are being loaded from them.

    Parameters
    ----------
    loader
        Makes the task that loads a key from its snapshots, and says on which workers it would be local.
    """

    def __init__(self, scheduler: Scheduler, loader: Callable[[Key, list[BlockRef]], tuple[Any, list[str]]]) -> None:
        self._scheduler = scheduler
        self._loader = loader
        self.snapshots: dict[Key, list[BlockRef]] = {}  # newest first
        self._standing: dict[Key, _Standing] = {}
        self.counts = {"loads": 0, "loaded": 0, "back_to_lineage": 0}

    # -- what is known ----------------------------------------------------------------------------------------------

    def add(self, key: Key, ref: BlockRef) -> None:
        """A block of `key` can be read from `ref` from now on (replaces what was known of that directory)."""
        refs = self.snapshots.setdefault(key, [])
        refs[:] = [ref, *(r for r in refs if r.directory != ref.directory)]
        ts = self._scheduler.tasks.get(key)
        # Dask would not even ask for these when they are lost: scattered data, and tasks that lost their upstream
        if ts is not None and ts.state == "memory" and (ts.run_spec is None or ts.has_lost_dependencies):
            self._install(ts)

    def drop(self, key: Key, directory: str) -> None:
        """The block of `key` in `directory` is gone."""
        refs = self.snapshots.get(key)
        if refs is not None:
            refs[:] = [r for r in refs if r.directory != directory]
            if not refs:
                del self.snapshots[key]

    def backed(self, keys: Iterable[Key], directory: str) -> bool:
        """Whether a live key needs its block in `directory`, because it has no newer snapshot.

        Live is what somebody wants or what is in memory. A key that Dask has released and only remembers as the lineage of
        others is not: in an iterative program that would be every key there ever was.
        """
        for key in keys:
            refs = self.snapshots.get(key)
            if refs and refs[0].directory == directory:
                ts = self._scheduler.tasks.get(key)
                if ts is not None and (ts.state == "memory" or ts.who_wants or ts.waiters):
                    return True
        return False

    def unreadable(self, key: Key) -> None:
        """A loader found no readable copy: do not offer these snapshots again."""
        self.snapshots.pop(key, None)
        logger.warning("no snapshot of %r is readable: Dask computes it again", key)

    def clear(self) -> None:
        self.snapshots.clear()
        self._standing.clear()

    # -- driven by the transition hook ------------------------------------------------------------------------------

    def transition(self, key: Key, start: str, finish: str) -> None:
        """Follow one transition of a key; called for keys that `concerns` is true for."""
        if finish == "released":
            if start == "memory":
                self._lost(key)
            elif key in self._standing:
                self._loader_stopped(key)
        elif finish == "memory":
            standing = self._standing.get(key)
            if standing is not None and standing.lineage is not None:
                self._back(key, self._scheduler.tasks[key])
                self.counts["loaded"] += 1
        elif finish == "forgotten":
            self.snapshots.pop(key, None)
            standing = self._standing.pop(key, None)
            if standing is not None and standing.lineage is not None:
                internals.drop_lineage(self._scheduler, standing.lineage)

    def stands_in(self, key: Key) -> bool:
        """Whether a loader of ours stands in for this key."""
        return key in self._standing

    def concerns(self, key: Key) -> bool:
        return key in self.snapshots or key in self._standing

    def _lost(self, key: Key) -> None:
        ts = self._scheduler.tasks[key]
        # nobody wants it: a deliberate release, not a loss
        if key in self.snapshots and not ts.actor and (ts.who_wants or ts.waiters):
            self._install(ts)
            self.counts["loads"] += 1
            # Dask does not wait for a task one of whose dependencies erred; the loader has none any more
            self._scheduler.loop.add_callback(internals.compute_if_wanted, self._scheduler, key)

    def _install(self, ts: TaskState) -> None:
        task, workers = self._loader(ts.key, self.snapshots[ts.key])
        first = ts.key not in self._standing
        lineage = internals.install_loader(self._scheduler, ts, task, workers, keep=first)
        if first:
            self._standing[ts.key] = _Standing(lineage)

    def _loader_stopped(self, key: Key) -> None:
        standing = self._standing[key]
        ts = self._scheduler.tasks[key]
        standing.deaths += 1
        if standing.lineage is None:
            return
        if key not in self.snapshots or standing.deaths > MAX_LOADER_DEATHS:
            self._back(key, ts)
            self.counts["back_to_lineage"] += 1

    def _back(self, key: Key, ts: TaskState) -> None:
        standing = self._standing.pop(key)
        assert standing.lineage is not None
        internals.restore_lineage(self._scheduler, ts, standing.lineage)
