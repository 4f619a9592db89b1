"""The command line: ``veloc-dask ...``, and the same as ``dask veloc ...``.

Owns the commands and their options; what they do lies in the modules that they call. A command imports its module when
it runs, so that ``--help`` and ``--version`` answer at once.
"""

from __future__ import annotations

import sys

import click


@click.group(name="veloc", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="veloc-dask", message="veloc-dask %(version)s")
def main() -> None:
    """Very low overhead checkpointing for Dask."""


@main.command()
def demo() -> None:
    """Lose a worker, then the whole cluster, and compute nothing twice.

    A heat equation on a cluster of four worker processes on this machine, in under 90 seconds, in temporary
    directories that are removed at the end. The exit status is 1 if a task had to run again, or if the result differs
    from that of an uninterrupted run.
    """
    from veloc_dask import demo

    sys.exit(demo.main())


if __name__ == "__main__":
    main()
