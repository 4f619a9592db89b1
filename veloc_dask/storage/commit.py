"""Runs, commits and tombstones: how a version comes to exist on the remote tier, exactly once.

A version exists from the instant at which its root is created, exclusively, and not before. In order: all blocks and table
segments are durable; the zarr.json files; the fence (a run that is no longer the newest may not commit); the root.

Crash windows: before the root, there is only a dead attempt, which no reader looks at; retention collects it after it has
taken the root's place with a tombstone, so a writer that was only slow finds the place taken. On file systems the root
comes out of the attempt's own directory, so it cannot appear after that has lost its name, whatever became of the place.
After the root, the version exists, whether or not the writer ever learns it: it recognises its own attempt when it reads
the root back, and takes a failed call for a success if the root is there and durable.
"""

from __future__ import annotations

import msgspec

from veloc_dask.storage import layout
from veloc_dask.storage import root as roots
from veloc_dask.storage.errors import IntegrityError, VersionExists
from veloc_dask.storage.faults import fault_point
from veloc_dask.storage.remote import Remote


class _Run(msgspec.Struct, frozen=True):
    run_uuid: str


def newest_run(remote: Remote, name: str) -> int:
    """The highest run number under `name`, 0 if there is none."""
    return max((r for e in remote.names(f"{name}/runs") if (r := layout.parse_run(e)) is not None), default=0)


def acquire_run(remote: Remote, name: str, run_uuid: str) -> int:
    """Take the next run number; from now on no lower run may commit."""
    document = msgspec.json.encode(_Run(run_uuid))
    run = newest_run(remote, name) + 1
    while not remote.create(f"{name}/runs/{layout.run_name(run)}", document):
        taken = remote.get(f"{name}/runs/{layout.run_name(run)}", limit=4096).tobytes()
        if taken == document:  # ours: the reply to our creation was lost
            break
        run += 1
    return run


def committed(remote: Remote, name: str) -> list[int]:
    """The versions whose place is taken (tombstones included), ascending."""
    return [v for e in remote.names(name) if (v := layout.parse_root(e)) is not None]


def read_root(remote: Remote, name: str, version: int) -> roots.Root | roots.Tombstone | None:
    """The root of a version, None if it does not exist; IntegrityError if it is damaged or not where it belongs."""
    path = f"{name}/{layout.root_name(version)}"
    try:
        data = remote.get(path, limit=roots.MAX_ROOT_NBYTES)
    except FileNotFoundError:
        return None
    root = roots.decode(data, where=f"{remote.label}/{path}")
    if (root.name, root.version) != (name, version):
        raise IntegrityError(
            f"{remote.label}/{path}: expected {name!r} version {version}, found {root.name!r} version {root.version}"
        )
    return root


def commit(remote: Remote, root: roots.Root, documents: dict[str, bytes]) -> None:
    """Make the version exist.

    Raises
    ------
    VersionExists
        Its number is taken, a later run has taken over the name, or the attempt was collected as dead.
    """
    assert root.run is not None
    base = f"{root.name}/{root.directory}"
    where = f"{root.name!r} version {root.version} on {remote.label}"
    remote.put_many([(f"{base}/{path}", [data]) for path, data in sorted(documents.items())])
    fault_point("commit.documents")
    if any(remote.size(f"{base}/{s.path}") != s.nbytes for s in root.segments):
        # the documents have made the directory anew, without what belongs in it
        if _is_ours(read_root(remote, root.name, root.version), root):
            return
        raise VersionExists(
            f"{where}: its files are gone, it was given up as dead and collected; save again with a higher version"
        )
    newest = newest_run(remote, root.name)
    if newest > root.run:
        if _is_ours(read_root(remote, root.name, root.version), root):
            return
        raise VersionExists(
            f"{where}: run {newest} has taken over this name, run {root.run} may not commit any more; restore in the newer "
            "run, or save under another name"
        )
    fault_point("commit.fenced")
    path, encoded = f"{root.name}/{layout.root_name(root.version)}", roots.encode(root)
    try:
        created = remote.create(path, encoded, within=base)
    except FileNotFoundError as error:
        created = None
        found = read_root(remote, root.name, root.version)
        if found is None:
            raise VersionExists(
                f"{where}: its files are gone, it was given up as dead and collected; save again with a higher version"
            ) from error
    except OSError:
        # the reply may be lost rather than the root; asking again makes sure that what is there is durable
        created = remote.create(path, encoded, within=base)
    fault_point("commit.created")
    if created:
        return
    found = read_root(remote, root.name, root.version)
    if _is_ours(found, root):
        return
    what = (
        "it was given up as dead and collected"
        if isinstance(found, roots.Tombstone)
        else "another attempt has committed it"
    )
    raise VersionExists(f"{where}: {what}; save again with a higher version")


def _is_ours(found: roots.Root | roots.Tombstone | None, root: roots.Root) -> bool:
    return isinstance(found, roots.Root) and found.attempt == root.attempt
