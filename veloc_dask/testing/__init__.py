"""Fakes and faults for tests of storage: processes that are killed, calls that fail, stores that lose a reply.

``faults`` arms the named points of ``veloc_dask.storage.faults``, ``syscalls`` makes the N-th call to the operating system
fail, ``processes`` runs a function in a child that can be killed or stopped, ``remotes`` wraps a remote tier, ``versions``
writes a small version and checks that everything in a store is whole. Nothing in here is imported by the rest of the package.
"""
