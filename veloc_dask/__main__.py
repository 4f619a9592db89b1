"""``python -m veloc_dask``: the command line."""

from veloc_dask.cli import main

main()
