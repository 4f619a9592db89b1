"""What a save costs, as ratios from one interleaved run.

    python benchmarks/save.py [--tier DIR] [--rounds N]

1. How long ``save`` blocks the caller, for 1,000 persisted blocks, against a bare call to the scheduler.
2. How fast one worker captures large arrays to a tier, checksum included, against ``os.writev`` of the same bytes to new files
   on the same tier, in the same worker process, one after the other (the limit that capture is measured by).
3. The longest time for which the scheduler's event loop did not turn during the saves of 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import veloc_dask as vd

BLOCK_NBYTES = 64 << 20
NBLOCKS = 8


def noop(dask_scheduler):
    return None


def start_probe(dask_scheduler):
    async def probe():
        last = time.perf_counter()
        while dask_scheduler.veloc_probe is not None:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            if dask_scheduler.veloc_probe is not None:
                dask_scheduler.veloc_probe = max(dask_scheduler.veloc_probe, now - last)
            last = now

    dask_scheduler.veloc_probe = 0.0
    dask_scheduler.veloc_task = asyncio.ensure_future(probe())


def stop_probe(dask_scheduler):
    longest, dask_scheduler.veloc_probe = dask_scheduler.veloc_probe, None
    return longest


def raw_write(keys, directory, dask_worker):
    """``os.writev`` of the same blocks to new files, from a thread, as capture does; seconds."""
    import concurrent.futures

    values = [dask_worker.data[k] for k in keys]

    def write():
        start = time.perf_counter()
        for n, value in enumerate(values):
            fd = os.open(os.path.join(directory, f"raw-{n}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            view = memoryview(value).cast("B")
            done = 0
            while done < len(view):
                done += os.writev(fd, [view[done:]])
            os.close(fd)
        seconds = time.perf_counter() - start
        for n in range(len(values)):
            os.unlink(os.path.join(directory, f"raw-{n}"))
        return seconds

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(write).result()


def spread(values):
    return f"median {statistics.median(values):.3g}, from {min(values):.3g} to {max(values):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="veloc-bench-", dir=options.tier)
    try:
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", memory_limit="4GiB") as cluster,
            Client(cluster) as client,
        ):
            ck = vd.Checkpointer(client, "bench", local=directory)
            small = da.ones(1000, chunks=1).persist()
            wait(small)
            calls, saves = [], []
            client.run_on_scheduler(start_probe)
            for _ in range(options.rounds + 1):
                start = time.perf_counter()
                client.run_on_scheduler(noop)
                calls.append(time.perf_counter() - start)
                start = time.perf_counter()
                handle = ck.save({"x": small})
                saves.append(time.perf_counter() - start)
                handle.wait("local")
            longest = client.run_on_scheduler(stop_probe)
            print(f"save() of 1,000 persisted blocks, ms:      {spread([s * 1e3 for s in saves[1:]])}")
            print(f"a bare call to the scheduler, ms:          {spread([c * 1e3 for c in calls[1:]])}")
            print(f"longest stall of the scheduler's loop, ms: {longest * 1e3:.1f}")

            big = da.random.default_rng(0).random(NBLOCKS * BLOCK_NBYTES // 8, chunks=BLOCK_NBYTES // 8).persist()
            wait(big)
            keys = [f.key for f in client.futures_of(big)]
            ratios, speeds, raws = [], [], []
            nbytes = NBLOCKS * BLOCK_NBYTES
            for n in range(options.rounds + 1):
                raw = next(iter(client.run(raw_write, keys, directory).values()))
                start = time.perf_counter()
                ck.save({"x": big}).wait("local")
                captured = time.perf_counter() - start
                if n:
                    ratios.append(raw / captured)
                    raws.append(nbytes / raw / 1e9)
                    speeds.append(nbytes / captured / 1e9)
            print(f"capture to level local, GB/s:              {spread(speeds)}")
            print(f"os.writev of the same bytes, GB/s:         {spread(raws)}")
            print(f"capture / os.writev, paired:               {spread(ratios)}")
            assert np.isclose(ck.restore()["x"][:10].compute(), big[:10].compute()).all()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
