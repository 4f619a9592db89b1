"""``veloc-dask demo``: a job that loses a worker, then its whole cluster, and computes nothing twice.

The job is the heat equation on a torus, one Dask task per block and step. Each of these tasks writes a line to a file
that is opened for appending, so what runs again is counted and not assumed. `run` plays the job three times: with
checkpoints and two disasters, with plain Dask and the first of these disasters, and in numpy without Dask, which says
what the field must be, bit for bit.

Called by the command line only. Everything is kept in temporary directories, which are removed however it ends.
Invariant: the worker is killed, and the cluster is torn down, only when no step is running. What is lost in the middle
of a step has to run again in any system, and would hide what this is about.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
from distributed import Client, LocalCluster, futures_of

import veloc_dask as vd

Field = npt.NDArray[np.float64]

SIDE, GRID = 2048, 4  # the field is SIDE x SIDE, cut into GRID x GRID blocks
BLOCK = SIDE // GRID
STEPS, EVERY = 32, 4  # a save every EVERY steps
KILL_AT, TEAR_DOWN_AT = 16, 24
WORKERS, WORKERS_AFTERWARDS = 4, 3
BLOCKS = GRID * GRID

# --- the job: these functions run on the workers -------------------------------------------------------------------


def note(tally: str, step: int, block: tuple[int, ...]) -> None:
    """Write down that the task of ``step`` and ``block`` runs; one short appending write is never torn."""
    fd = os.open(tally, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{step} {block[0]} {block[1]}\n".encode())
    finally:
        os.close(fd)


def hot_spots(block: tuple[int, ...]) -> Field:
    """One block of the field at step 0."""
    return np.random.default_rng([17, *block]).random((BLOCK, BLOCK)) ** 8 * 100


def first(tally: str, block_id: tuple[int, ...]) -> Field:
    note(tally, 0, block_id)
    return hot_spots(block_id)


def rim(block: Field) -> Field:
    """The first and last row and the first and last column: all that the neighbours need."""
    return np.stack([block[0], block[-1], block[:, 0], block[:, -1]])


def diffuse(u: Field, north: Field, south: Field, west: Field, east: Field) -> Field:
    """One explicit step of the five-point stencil; how the field is cut does not matter, not even to the last bit."""
    padded = np.empty((u.shape[0] + 2, u.shape[1] + 2))
    padded[1:-1, 1:-1] = u
    padded[0, 1:-1], padded[-1, 1:-1] = north, south
    padded[1:-1, 0], padded[1:-1, -1] = west, east
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return u + 0.2 * (around - 4 * u)


def advance(
    u: Field, north: Field, south: Field, west: Field, east: Field, *, tally: str, step: int, block_id: tuple[int, ...]
) -> Field:
    """The task of one block and step; the neighbours are given by their rims."""
    note(tally, step, block_id)
    return diffuse(u, north[1], south[0], west[3], east[2])


# --- the job: as a user of Dask would write it ---------------------------------------------------------------------


def initial(tally: Path) -> da.Array:
    chunks = ((BLOCK,) * GRID,) * 2
    u: da.Array = da.map_blocks(first, tally=str(tally), chunks=chunks, dtype="f8", meta=np.empty((0, 0)))
    return u


def heat_step(u: da.Array, step: int, tally: Path) -> da.Array:
    like = {
        "dtype": u.dtype,
        "meta": u._meta,
    }  # or Dask would call the functions to find out, and they would be counted
    rims = da.map_blocks(rim, u, chunks=((4,) * GRID, u.chunks[1]), **like)
    before, after = [GRID - 1, *range(GRID - 1)], [*range(1, GRID), 0]
    around = rims.blocks[before], rims.blocks[after], rims.blocks[:, before], rims.blocks[:, after]
    u = da.map_blocks(advance, u, *around, tally=str(tally), step=step, chunks=u.chunks, **like)
    return u


def heat_steps(u: da.Array, done: int, tally: Path) -> da.Array:
    """The steps up to the next save, on their way."""
    for step in range(done + 1, done + EVERY + 1):
        u = heat_step(u, step, tally)
    held: da.Array = u.persist()
    return held


def uninterrupted() -> Field:
    """The same in numpy, in one piece."""
    u = np.block([[hot_spots((i, j)) for j in range(GRID)] for i in range(GRID)])
    for _ in range(STEPS):
        u = diffuse(u, u[-1], u[0], u[:, -1], u[:, 0])
    return u


# --- what is measured, and how it is shown -------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What one run has measured."""

    versions: int
    blocks_saved: int
    bytes_saved: int
    blocked_s: float  # all the time that the job spent in `save`
    job_s: float  # from the first task to the last, both disasters included
    blocks_lost: int
    again_after_kill: int
    again_after_tear_down: int
    plain_blocks_lost: int
    plain_again_after_kill: int
    tasks_at_tear_down: int
    equal: bool

    @property
    def ok(self) -> bool:
        return self.equal and self.again_after_kill == 0 and self.again_after_tear_down == 0


class Tally:
    """The file in which tasks write down that they run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _runs(self) -> Counter[str]:
        return Counter(self.path.read_text().splitlines()) if self.path.exists() else Counter()

    def done(self) -> int:
        """How many of the tasks have run at least once."""
        return len(self._runs())

    def again(self) -> int:
        """How many runs of tasks were not the first."""
        runs = self._runs()
        return runs.total() - len(runs)


class Screen:
    """A time line on stdout, with a progress bar below it where somebody looks at it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._tasks = BLOCKS * (STEPS + 1)
        self._bar = None
        if sys.stdout.isatty():
            self._bar = click.progressbar(
                length=self._tasks,
                width=40,
                show_eta=False,
                fill_char="#",
                empty_char=".",
                bar_template=" %(label)s [%(bar)s] %(info)s",
            )

    def say(self, text: str) -> None:
        if self._bar is not None:
            click.echo("\r\x1b[2K", nl=False)  # the bar goes; the next `show` draws it below the new line
        click.echo(f"{time.monotonic() - self._start:6.1f} s  {text}")

    def show(self, tally: Tally) -> None:
        if self._bar is not None:
            done = tally.done()
            self._bar.label = f"step {max(done - 1, 0) // BLOCKS:2d} of {STEPS}"
            self._bar.update(done - self._bar.pos)

    def close(self) -> None:
        """No bar from now on, and the cursor again, which the bar has hidden."""
        if self._bar is not None:
            click.echo("\r\x1b[2K\x1b[?25h", nl=False)
            self._bar = None


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def table(f: Figures) -> str:
    share = 100 * f.blocked_s / f.job_s
    field = "equal, bit for bit" if f.equal else "DIFFERENT"
    rows = [
        ("", "veloc_dask", "plain Dask"),
        ("saved", f"{f.blocks_saved} blocks, {mib(f.bytes_saved)}", "-"),
        ("the job was blocked by saves", f"{1000 * f.blocked_s:.0f} ms, {share:.1f} %", "-"),
        (f"worker killed at step {KILL_AT}: blocks lost", str(f.blocks_lost), str(f.plain_blocks_lost)),
        ("  tasks run again", str(f.again_after_kill), str(f.plain_again_after_kill)),
        (f"cluster lost at step {TEAR_DOWN_AT}: blocks lost", str(BLOCKS), str(BLOCKS)),
        ("  tasks run again", str(f.again_after_tear_down), f"all {f.tasks_at_tear_down}"),
        (f"the field after {STEPS} steps", field, ""),
    ]
    return "\n".join(f"  {name:<40}{ours:>22}{plain:>13}".rstrip() for name, ours, plain in rows)


# --- the three runs ------------------------------------------------------------------------------------------------


def dask_setup(_worker: object) -> None:
    """In each worker process: Ctrl-C reaches all processes of a terminal, but only the client shall act on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def cluster(workers: int, scratch: Path) -> Iterator[Client]:
    """A cluster of processes. It keeps quiet about the workers that it is going to lose."""
    with (
        dask.config.set({"temporary-directory": str(scratch)}),  # the scheduler's; that of the workers is given below
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit="512MiB",
            dashboard_address=None,
            local_directory=str(scratch),
            silence_logs=logging.CRITICAL,
            preload=["veloc_dask.demo"],  # runs `dask_setup` below
        ) as local,
        Client(local) as client,
    ):
        yield client


def kill_a_worker(client: Client, u: da.Array) -> int:
    """SIGKILL the worker that loses most of ``u``; say how many blocks existed only there."""
    holders = client.who_has(futures_of(u))
    only = Counter(who[0] for who in holders.values() if len(who) == 1)
    victim, lost = only.most_common(1)[0]
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    while victim in client.scheduler_info(n_workers=-1)["workers"]:
        time.sleep(0.02)
    return lost


def finish(client: Client, u: da.Array, tally: Tally, screen: Screen) -> None:
    """Wait until every block of ``u`` is in a worker's memory, and show how far the job is.

    The scheduler is asked, because the client may not have heard yet that a future which was done has been lost.
    """
    futures = futures_of(u)
    while not all(client.who_has(futures).values()):
        for future in futures:
            if future.status == "error":
                future.result()  # raises what has gone wrong
        screen.show(tally)
        time.sleep(0.05)
    screen.show(tally)


class Job:
    """The job with checkpoints: two clusters, one after the other, that share nothing but the storage."""

    def __init__(self, base: Path, fast: Path, screen: Screen) -> None:
        self.base, self.fast, self.screen = base, fast, screen
        self.tally = Tally(base / "tally")
        self.saved: list[vd.SaveHandle] = []
        self.blocked_s = 0.0

    def checkpointer(self, client: Client) -> vd.Checkpointer:
        tiers = [vd.Tier(str(self.fast), capacity="256 MiB"), vd.Tier(str(self.base / "disk"))]
        return vd.Checkpointer(client, "heat", local=tiers, remote=str(self.base / "remote"), keep=2)

    def advance(self, client: Client, ck: vd.Checkpointer, u: da.Array, done: int, until: int) -> da.Array:
        """Go on with ``u``, and save it every few steps, while it is still being computed."""
        while done < until:
            u = heat_steps(u, done, self.tally.path)
            done += EVERY
            start = time.perf_counter()
            handle = ck.save({"u": u, "step": done})
            took_s = time.perf_counter() - start
            u = handle.value["u"]
            finish(client, u, self.tally, self.screen)
            self.blocked_s += took_s
            self.saved.append(handle)
            durable = max((str(h.version) for h in self.saved if h.level == "durable"), default="none yet")
            waited = f"the job waited {1000 * took_s:5.1f} ms"
            self.screen.say(f"step {done:2d} saved as version {handle.version}: {waited}; durable: {durable}")
        return u

    def play(self) -> dict[str, Any]:
        """Both clusters; what `Figures` calls the rest, and the field."""
        say, start = self.screen.say, time.monotonic()
        with cluster(WORKERS, self.base / "scratch") as client:
            say(f"a cluster of {WORKERS} worker processes")
            ck = self.checkpointer(client)
            u = self.advance(client, ck, initial(self.tally.path), 0, KILL_AT)
            self.saved[-1].wait("local", timeout=60)
            lost = kill_a_worker(client, u)
            say(f"SIGKILL: a worker is gone, and with it {lost} of the {BLOCKS} blocks")
            finish(client, u, self.tally, self.screen)
            say(f"the {lost} blocks are back from their snapshots; tasks run again: {self.tally.again()}")
            u = self.advance(client, ck, u, KILL_AT, TEAR_DOWN_AT)
            self.saved[-1].wait("durable", timeout=60)
            say(f"version {self.saved[-1].version} is durable: the whole cluster goes down")
            tasks, again = self.tally.done(), self.tally.again()
            ck.close()
            del u
        with cluster(WORKERS_AFTERWARDS, self.base / "scratch") as client:
            ck = self.checkpointer(client)
            state = ck.restore()
            say(f"a new cluster of {WORKERS_AFTERWARDS} worker processes goes on from step {state['step']}")
            u = self.advance(client, ck, state["u"], state["step"], STEPS)
            field = u.compute()
            again_afterwards = self.tally.again() - again
            job_s = time.monotonic() - start
            self.saved[-1].wait("durable", timeout=60)
            ck.close()
            del u, state
        return {
            "field": field,
            "versions": len(self.saved),
            "blocks_saved": sum(handle.progress()["captured"] for handle in self.saved),
            "bytes_saved": sum(handle.progress()["captured_nbytes"] for handle in self.saved),
            "blocked_s": self.blocked_s,
            "job_s": job_s,
            "blocks_lost": lost,
            "again_after_kill": again,
            "again_after_tear_down": again_afterwards,
            "tasks_at_tear_down": tasks,
        }


def plain_dask(base: Path, screen: Screen) -> tuple[int, int]:
    """The same job without us up to the kill: blocks lost and tasks run again."""
    tally = Tally(base / "tally-plain")
    screen.say("to compare: the same in plain Dask, with the same disaster")
    with cluster(WORKERS, base / "scratch") as client:
        u = initial(tally.path)
        for done in range(0, KILL_AT, EVERY):
            u = heat_steps(u, done, tally.path)
            finish(client, u, tally, screen)
        lost = kill_a_worker(client, u)
        finish(client, u, tally, screen)
        again = tally.again()
        screen.say(f"a worker killed at step {KILL_AT}: {lost} blocks lost, tasks run again: {again}")
        del u
    return lost, again


def run(base: Path, fast: Path, screen: Screen) -> Figures:
    """Play the job with checkpoints, with plain Dask, and in numpy."""
    job = Job(base, fast, screen).play()
    screen.close()
    plain_lost, plain_again = plain_dask(base, screen)
    field = job.pop("field")
    equal = np.array_equal(field.view("u8"), uninterrupted().view("u8"))
    screen.say(f"the same in numpy, not interrupted: {'equal, bit for bit' if equal else 'DIFFERENT'}")
    return Figures(plain_blocks_lost=plain_lost, plain_again_after_kill=plain_again, equal=equal, **job)


def terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def end_processes() -> None:
    """A cluster that is interrupted while it starts leaves worker processes, and these would make directories again."""
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


def main() -> int:
    """Run the demo in temporary directories; the exit status."""
    signal.signal(signal.SIGTERM, terminate)  # as Ctrl-C: clusters and directories go away
    with contextlib.ExitStack() as stack:
        places = [Path(tempfile.gettempdir())]
        if os.access("/dev/shm", os.W_OK):
            places.append(Path("/dev/shm"))
        made = []
        for place in places:
            made.append(Path(tempfile.mkdtemp(prefix="veloc-demo-", dir=place)))
            stack.callback(shutil.rmtree, made[-1], ignore_errors=True)
        stack.callback(end_processes)
        base, fast = made[0], made[-1] / "fast"
        click.echo("The heat equation, on a cluster that loses a worker and then everything.")
        cells = f"{SIDE} x {SIDE} cells in {BLOCKS} blocks ({mib(SIDE * SIDE * 8)})"
        click.echo(f"  {cells}, {STEPS} steps, a save every {EVERY}")
        click.echo(f"  node-local tiers  {fast}, {base / 'disk'}\n  remote tier       {base / 'remote'}\n")
        screen = Screen()
        stack.callback(screen.close)
        figures = run(base, fast, screen)
    click.echo("\n" + table(figures))
    if not figures.ok:
        click.echo("\nThis is not what was promised: see the lines above.", err=True)
    return 0 if figures.ok else 1
