"""Blocks, tiers, formats and commits: everything that touches storage, and nothing that knows of Dask.

The order of the data flow is the order to read in: ``blocks`` (a value becomes bytes), ``placement`` (which tier),
``tiers`` and ``files`` (a block is written), ``remote`` (it is copied to the remote tier), ``table`` and ``root`` (what a
version consists of), ``commit`` (the instant at which it exists), ``reader`` (it comes back), ``retention`` (it goes).
Paths are built in ``layout`` alone.
"""
