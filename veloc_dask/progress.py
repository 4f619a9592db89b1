"""A progress bar for a save, in a terminal or a notebook."""

from __future__ import annotations

import sys
import time
from typing import Any

from veloc_dask.errors import ConfigError
from veloc_dask.handle import SaveHandle

WIDTH = 40
INTERVAL_S = 0.1


def progress(handle: SaveHandle, level: str | None = None, *, file: Any = None) -> None:
    """Show how far a save has come until it reaches a level, as `distributed.progress` does for tasks.

    Parameters
    ----------
    handle
        What `Checkpointer.save` returned, of a synchronous client.
    level
        "local" or "durable"; None is the highest one that the checkpointer can reach.
    file
        Where to draw, by default the standard output.

    Raises
    ------
    VelocError
        The save failed.
    """
    if handle._checkpointer.client.asynchronous:
        raise ConfigError(
            "progress() blocks; with an asynchronous client use handle.progress() and await handle.wait()"
        )
    level = level or ("durable" if handle._checkpointer.remote is not None else "local")
    out = file if file is not None else sys.stdout
    start = time.monotonic()
    while True:
        try:
            handle.wait(level, timeout=INTERVAL_S)
            finished = True
        except TimeoutError:
            finished = False
        counts = handle.progress()
        steps = counts["blocks"] * (2 if level == "durable" else 1)
        done = counts["captured"] + (counts["flushed"] if level == "durable" else 0)
        share = 1.0 if finished else min(1.0, done / steps) if steps else 0.0
        bar = "#" * int(WIDTH * share)
        out.write(
            f"\r[{bar:<{WIDTH}}] {100 * share:3.0f}% version {handle.version}: {handle.level:<8} "
            f"{counts['captured']}/{counts['blocks']} captured, {counts['flushed']} flushed, {time.monotonic() - start:.1f} s"
        )
        out.flush()
        if finished:
            out.write("\n")
            return
