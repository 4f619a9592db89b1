"""What the recovery tests share: counted functions, a cluster that can be hurt, and storage that can be slowed or damaged.

Worker processes import this module too, so nothing here depends on pytest. Functions count their runs in a file opened with
O_APPEND: one short write is one line, whichever process does it, and a killed process loses nothing of it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, get_worker
from distributed.client import futures_of
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

import veloc_dask as vd
from veloc_dask.scheduler_plugin.saves import BlockState
from veloc_dask.storage import reader, remote, tiers

T = TypeVar("T")

DEADLINE_S = 30.0
VALIDATED = {
    "distributed.scheduler.validate": True,
    "distributed.worker.validate": True,
    "distributed.admin.low-level-log-length": 200_000,
    # 15 s after a worker's death the cluster closes its nanny if the worker is away at that moment: it may have been killed
    # for the second time just then
    "distributed.deploy.lost-worker-timeout": "1h",
}


def until(reached: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Poll until `reached` returns something true, and return that."""
    end = time.monotonic() + deadline_s
    while True:
        found = reached()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.02)


# -- counted functions ---------------------------------------------------------------------------------------------------


def mark(log: str, tag: str) -> None:
    fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.write(fd, f"{tag}\n".encode())
    finally:
        os.close(fd)


def counts(log: str) -> dict[str, int]:
    """How often each tag was marked."""
    path = Path(log)
    return dict(Counter(path.read_text().splitlines())) if path.exists() else {}


def add(block: Any, *, log: str, tag: str, block_id: Any = None, pause_s: float = 0.0, amount: float = 1) -> Any:
    """For ``map_blocks``: counted per block."""
    mark(log, f"{tag}{'.'.join(map(str, block_id or ()))}")
    time.sleep(pause_s)
    return block + amount


def counted(x: Any, log: str, tag: str, *, pause_s: float = 0.0, amount: float = 1) -> Any:
    """``x + amount`` as a Dask array whose blocks are counted."""
    meta = np.empty((0,) * x.ndim)  # else Dask runs the function once more to learn what it returns
    return x.map_blocks(add, log=log, tag=tag, pause_s=pause_s, amount=amount, dtype=float, meta=meta)


def rows(log: str, tag: str, *, number: int = 8, size: int = 64, pause_s: float = 0.0) -> Any:
    """A Dask array with a counted block per row, `field` plus one."""
    return counted(da.from_array(field(number, size), chunks=(1, size)), log, tag, pause_s=pause_s)


def same(frame: Any, *, log: str, tag: str, pause_s: float = 0.0) -> Any:
    """For ``map_partitions``: counted by tag."""
    mark(log, tag)
    time.sleep(pause_s)
    return frame


def combine(*parts: Any, log: str, tag: str, pause_s: float = 0.0) -> Any:
    """For ``delayed`` and ``submit``: the sum of its arguments."""
    mark(log, tag)
    time.sleep(pause_s)
    return sum(parts)


def nothing(*parts: Any, log: str, tag: str) -> None:
    mark(log, tag)


def where(value: Any, *, log: str, tag: str) -> str:
    mark(log, tag)
    return str(get_worker().address)


# -- storage that is slow, or waits --------------------------------------------------------------------------------------


class HeldStorage(WorkerPlugin):
    """One kind of storage access takes `pause_s` longer, and while the file `gate` exists it waits for it to go."""

    PLACES: ClassVar[dict[str, tuple[Any, str]]] = {
        "remote": (remote.PosixRemote, "put_many"),
        "local": (tiers.Tier, "write"),
        "commit": (remote.PosixRemote, "create"),
        "read": (reader, "read_verified"),
    }

    def __init__(self, *, gate: str = "", pause_s: float = 0.0, which: str = "remote") -> None:
        self.gate = gate
        self.pause_s = pause_s
        self.which = which
        self.name = f"held-{which}"

    def setup(self, worker: Any) -> None:
        owner, method = self.PLACES[self.which]
        self._undo = (owner, method, getattr(owner, method))
        write = self._undo[2]

        def held(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.pause_s)
            if self.gate and os.path.exists(self.gate):
                Path(self.gate + ".reached").touch()
            while self.gate and os.path.exists(self.gate):
                time.sleep(0.01)
            return write(*args, **kwargs)

        setattr(owner, method, held)

    def teardown(self, worker: Any) -> None:
        setattr(*self._undo)


# -- the cluster ---------------------------------------------------------------------------------------------------------


class Losses(SchedulerPlugin):
    """Which keys that somebody wanted left memory, and whether they had a snapshot at that instant."""

    name = "test-losses"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, bool]] = []

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        ts = self.scheduler.tasks.get(key)
        if start == "memory" and finish in ("released", "forgotten") and ts is not None and ts.who_wants:
            self.seen.append((key, key in self.scheduler.plugins["veloc"].recovery.snapshots))


class Bed:
    """A cluster of worker processes whose state is validated at each step, with tiers and a remote below `where`."""

    def __init__(
        self, directory: Path, *, n_workers: int = 3, config: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.directory = directory
        self.local = [str(directory / "fast"), str(directory / "disk")]
        self.remote = str(directory / "remote")
        self.n_workers = n_workers
        self._names = 0
        self._checkpointers: list[vd.Checkpointer] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self._set = dask.config.set(VALIDATED | (config or {}))
        # a nanny turns its worker's validation off unless it is told, whatever the configuration says
        options = {"processes": True, "memory_limit": "1GiB", "validate": True} | options
        self.cluster = LocalCluster(
            n_workers=n_workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", **options
        )
        self.client = Client(self.cluster)
        self.client.wait_for_workers(n_workers)
        assert self.on_scheduler(lambda s: s.validate)
        assert all(self.client.run(lambda dask_worker: dask_worker.state.validate).values())

    def close(self) -> None:
        for process in self._others:
            process.kill()
            process.wait()
        self.client.close()
        self.cluster.close()
        self._set.__exit__(None, None, None)

    # -- the scheduler, which lives in this process

    def on_scheduler(self, function: Callable[[Any], T]) -> T:
        """Call ``function(scheduler)`` on the scheduler's event loop."""

        async def call() -> T:
            return function(self.cluster.scheduler)

        return self.cluster.sync(call)  # type: ignore[no-any-return]

    def validate(self) -> None:
        self.on_scheduler(lambda s: s.validate_state())

    def stats(self) -> dict[str, Any]:
        return self.client.sync(self.client.scheduler.veloc_stats)  # type: ignore[no-any-return]

    def tasks(self) -> list[str]:
        return self.on_scheduler(lambda s: sorted(map(str, s.tasks)))

    def held_lineages(self) -> list[str]:
        return [k for k in self.tasks() if k.startswith("veloc-lineage-")]

    def runs(self, named: str) -> Counter[Any]:
        """How often each task with `named` in its key was sent to a worker."""
        return self.on_scheduler(
            lambda s: Counter(t[0] for t in s.transition_log if t[2] == "processing" and named in str(t[0]))
        )

    @contextmanager
    def losses(self) -> Iterator[Losses]:
        plugin = Losses()

        async def add(scheduler: Any) -> None:
            await plugin.start(scheduler)
            scheduler.add_plugin(plugin)

        async def run() -> None:
            await add(self.cluster.scheduler)

        self.cluster.sync(run)
        try:
            yield plugin
        finally:
            self.on_scheduler(lambda s: s.remove_plugin(plugin.name))

    # -- checkpointers

    def checkpointer(self, **options: Any) -> vd.Checkpointer:
        """A checkpointer with a name of its own."""
        self._names += 1
        options = {"local": self.local, "remote": self.remote} | options
        ck = vd.Checkpointer(self.client, f"t{self._names}", **options)
        self._checkpointers.append(ck)
        return ck

    @contextmanager
    def held(self, which: str, *, gate: Path | None = None, pause_s: float = 0.0) -> Iterator[Callable[[], None]]:
        """Slow one kind of storage access on all workers, those that are yet to come too; yields what opens the gate."""
        plugin = HeldStorage(gate=str(gate or ""), pause_s=pause_s, which=which)

        def release() -> None:
            if gate is not None:
                gate.unlink(missing_ok=True)

        if gate is not None:
            gate.touch()
        self.client.register_plugin(plugin)
        try:
            yield release
        finally:
            release()
            self.client.unregister_worker_plugin(plugin.name)

    def captured_keys(self, handle: Any) -> set[Any]:
        def find(scheduler: Any) -> set[Any]:
            for space in scheduler.plugins["veloc"].spaces.values():
                driver = space.drivers.get(handle._id)
                if driver is not None:
                    save = driver.save
                    return {k for k, s in zip(save.keys, save.states, strict=True) if s >= BlockState.CAPTURED}
            raise LookupError(handle)

        return self.on_scheduler(find)

    # -- workers and their deaths

    def workers(self) -> list[str]:
        return self.on_scheduler(lambda s: sorted(s.workers))

    def pid(self, worker: str) -> int:
        return int(self.client.run(os.getpid, workers=[worker])[worker])

    def holder(self, value: Any) -> str:
        """The worker that alone holds most blocks of a value."""
        sole = self.sole_holdings(value)
        return max(sole, key=lambda w: len(sole[w]))

    def sole_holdings(self, value: Any) -> dict[str, set[Any]]:
        """Per worker, the keys of a value that nobody else holds."""
        found: dict[str, set[Any]] = {w: set() for w in self.workers()}
        for key, holders in self.client.who_has(futures_of(value)).items():
            if len(holders) == 1:
                found[holders[0]].add(key)
        return found

    def kill(self, *workers: str) -> None:
        """SIGKILL worker processes all at once, and wait until the scheduler has noticed."""
        pids = [self.pid(w) for w in workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not set(workers) & set(self.workers()), f"the scheduler notices the death of {workers}")

    def kill_holder(self, value: Any) -> int:
        """Kill the worker that holds most of a value; the number of blocks that nobody else held."""
        worker = self.holder(value)
        lost = self.sole_holdings(value)[worker]
        assert lost
        self.kill(worker)
        return len(lost)

    def start_other_worker(self) -> tuple[str, subprocess.Popen[bytes]]:
        """A worker under a nanny in a process of its own (those of LocalCluster live in this process)."""
        before = set(self.workers())
        command = [sys.executable, "-m", "distributed.cli.dask_worker", self.cluster.scheduler_address]
        command += [
            "--nthreads",
            "1",
            "--memory-limit",
            "1GiB",
            "--no-dashboard",
            "--name",
            f"other-{len(self._others)}",
        ]
        command += ["--local-directory", str(self.directory)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "DASK_DISTRIBUTED__WORKER__VALIDATE": "True",
        }
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._others.append(process)
        (worker,) = until(lambda: set(self.workers()) - before, "the other worker joins")
        return worker, process

    def settle(self) -> None:
        """Wait until nannies have brought all workers back, and these have opened the tiers of every name."""

        def missing(scheduler: Any) -> list[str]:
            plugin = scheduler.plugins.get("veloc")
            workers = {w for w, ws in scheduler.workers.items() if ws.status.name == "running"}
            found = ["a worker"] * (self.n_workers - len(workers))
            for space in plugin.spaces.values() if plugin is not None else ():
                found += [
                    f"{w} with {space.name} ({space.nodes.open_errors.get(w)})" for w in workers - set(space.nodes.of)
                ]
            return found

        end = time.monotonic() + DEADLINE_S
        while found := self.on_scheduler(missing):
            assert time.monotonic() < end, f"still missing: {found}"
            time.sleep(0.02)

    # -- files

    def files(self, ck: vd.Checkpointer, *where: str) -> list[Path]:
        """The block files of a checkpointer on the local tiers ("local"), the remote ("remote"), or both."""
        roots = [r for p in self.local for r in Path(p).glob(f"veloc-*/*/{ck.name}")] if "local" in where else []
        roots += [Path(self.remote) / ck.name] if "remote" in where else []
        # unlike Path.rglob, os.walk does not mind a directory that is removed meanwhile
        found = [Path(d, f) for root in roots for d, _, names in os.walk(root) for f in names]
        return sorted(f for f in found if "c" in f.parts and not f.name.startswith("."))

    # -- the end of a test

    def close_checkpointers(self) -> None:
        while self._checkpointers:
            self._checkpointers.pop().close(timeout=20)

    def assert_clean(self) -> None:
        """Nothing of a test is left on the scheduler: no task, no stand-in, no table entry, and nothing failed."""

        def left(scheduler: Any) -> list[str]:
            plugin = scheduler.plugins.get("veloc")
            found = sorted(map(str, scheduler.tasks))
            if plugin is not None:
                found += [f"snapshot of {k!r}" for k in plugin.recovery.snapshots]
                found += [f"loader for {k!r}" for k in plugin.recovery._standing]
                found += [f"wanted {k!r}" for k in plugin.wanted]
                found += [f"protected {k!r}" for k in plugin.protectors]
                found += [f"client {c!r}" for c in scheduler.clients if c.startswith("veloc-")]
            return found

        end = time.monotonic() + 15
        while found := self.on_scheduler(left):
            assert time.monotonic() < end, f"left on the scheduler: {found}"
            gc.collect()
            time.sleep(0.05)
        self.validate()
        if self.on_scheduler(lambda s: "veloc" in s.plugins):
            assert self.stats()["failures"] == 0


def flip(paths: Iterable[Path]) -> int:
    """Change a few bytes inside each file; how many files."""
    number = 0
    for path in paths:
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            at = size // 2
            file.seek(at)
            old = file.read(4)
            file.seek(at)
            file.write(bytes(b ^ 0xFF for b in old))
        number += 1
    return number


def keys_of(value: Any) -> set[Any]:
    return {f.key for f in futures_of(value)}


def field(n: int = 8, size: int = 64) -> np.ndarray:
    """A small array without two equal values."""
    return np.arange(n * size, dtype=float).reshape(n, size)
