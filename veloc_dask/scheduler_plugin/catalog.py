"""Which versions there are, at which level, and where their blocks lie: asked of the workers, put together on the scheduler.

A version on the remote tier is durable. One that is not there is restorable from node-local tiers if one valid root is found
and every table segment and every block that it lists is (design, section 5); anything less is reported, never skipped in
silence.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from veloc_dask.scheduler_plugin.messages import LocalPart, RemoteList, Version
from veloc_dask.storage.errors import BlockLost, CheckpointNotFound, IntegrityError, VelocError

if TYPE_CHECKING:
    from veloc_dask.scheduler_plugin.space import Space

logger = logging.getLogger("veloc_dask")


class Catalog(msgspec.Struct):
    versions: list[Version]  # ascending; of one number the best one
    taken: set[int]  # numbers that cannot be used any more
    seen: set[int]  # numbers of which at least a part was found
    problems: list[str]  # roots that cannot be read


async def gather(space: Space) -> Catalog:
    """Ask every node, and one worker about the remote tier."""
    remote = RemoteList((), (), ())
    trouble: VelocError | None = None
    if space.config.remote is not None:
        try:
            reply = await space.nodes.call("", "list_remote")
            remote = msgspec.msgpack.decode(reply, type=RemoteList)
        except VelocError as error:
            trouble = error
            logger.warning("the remote tier of %s cannot be listed: %s", space.name, error)
    parts: dict[str, list[LocalPart]] = {}
    for reply in await space.nodes.call_all("list_local"):
        for part in msgspec.msgpack.decode(reply, type=list[LocalPart]):
            parts.setdefault(part.directory, []).append(part)
    active = {d.save.directory for d in space.active()}
    found: dict[int, Version] = {}
    for r in remote.versions:
        found[r.version] = Version(r.version, "durable", r.nblocks, r.nbytes, r.created, r.directory)
    ranked = sorted(parts.items(), key=lambda p: (p[1][0].version, p[1][0].run, p[1][0].created))
    for directory, held in ranked:
        version = _local_version(directory, held)
        before = found.get(version.version)
        if directory in active and version.level != "local":
            continue  # being written at this moment
        if before is None or (before.level != "durable" and (version.level == "local" or before.level == "incomplete")):
            found[version.version] = version
    if trouble is not None and not found:
        raise trouble
    # without a remote tier a number that was used once stays used, also if a part of that version is missing now
    usable = [v for v, f in found.items() if f.level != "incomplete" or space.config.remote is None]
    taken = {*remote.taken, *usable}
    for problem in remote.problems:
        logger.warning("%s: %s", space.name, problem)
    return Catalog([found[v] for v in sorted(found)], taken, set(found), list(remote.problems))


def _local_version(directory: str, held: list[LocalPart]) -> Version:
    first = held[0]
    present = {s for p in held for s in p.present}
    problem = ""
    if absent := sorted(set(first.segments) - present):
        problem = f"{len(absent)} of {len(first.segments)} table segments are on no node of this cluster"
    elif holes := sum(p.nmissing for p in held):
        problem = f"{holes} of {first.nblocks} blocks are on no tier, the first one is {next(m for p in held for m in p.missing)}"
    return Version(
        first.version,
        "incomplete" if problem else "local",
        first.nblocks,
        first.nbytes,
        first.created,
        directory,
        problem,
    )


def choose(name: str, catalog: Catalog, version: int | None) -> tuple[Version, list[str]]:
    """The version to restore, and what to tell the user about newer ones that cannot be.

    "There is none" is only said where none is there: a root that cannot be read (damaged, or of a newer format) is an error,
    or the caller would begin again from nothing.
    """
    known = catalog.versions
    complete = [v for v in known if v.level != "incomplete"]
    if version is not None:
        for v in known:
            if v.version == version and v.level == "incomplete":
                raise BlockLost(
                    f"{name!r} version {version} is incomplete: {v.problem}; start the workers on the nodes that wrote it "
                    "(wait_for= waits for them), or restore another version"
                )
        complete = [v for v in complete if v.version == version]
    if not complete and catalog.problems:
        raise IntegrityError(f"{name!r}: no complete version can be read, but there is {'; '.join(catalog.problems)}")
    if not complete:
        there = ", ".join(str(v.version) for v in known if v.level != "incomplete") or "none"
        what = f"{name!r} version {version}" if version is not None else f"a complete version of {name!r}"
        problems = "".join(
            f"; version {v.version} is incomplete: {v.problem}" for v in known if v.problem and version is None
        )
        raise CheckpointNotFound(f"{what} does not exist; complete versions: {there}{problems}")
    best = complete[-1]
    newer = [v for v in known if version is None and v.version > best.version]
    notes = [f"{name!r} version {v.version} is newer but incomplete: {v.problem}" for v in newer]
    if version is None:
        notes += [f"{name!r}: a version that cannot be read is passed over: {p}" for p in catalog.problems]
    return best, notes


async def fetch(space: Space, version: int | None, client: str) -> dict[str, Any]:
    """Root and table of a version for a client, under a lease that keeps its blocks."""
    best, notes = choose(space.name, await gather(space), version)
    lease_id = space.lease(best.directory, client)
    try:
        if best.level == "durable":
            replies = [
                await space.nodes.call("", "read_version", directory=best.directory, version=best.version, remote=True)
            ]
        else:
            replies = await space.nodes.call_all(
                "read_version", directory=best.directory, version=best.version, remote=False
            )
            replies = [r for r in replies if r["root"]]
        if not replies:
            raise BlockLost(f"{space.name!r} version {best.version}: its root vanished while it was read; try again")
    except BaseException:
        del space.leases[lease_id]
        raise
    return {
        "lease": lease_id,
        "directory": best.directory,
        "level": best.level,
        "root": replies[0]["root"],
        "segments": {path: data for reply in replies for path, data in reply["segments"].items()},
        "notes": notes,
    }


async def delete(space: Space, version: int) -> None:
    """Remove one version everywhere."""
    if any(d.save.version == version for d in space.active() if d.pins):
        raise VelocError(f"{space.name!r} version {version} is being saved; wait for it first")
    found = [v for v in (await gather(space)).versions if v.version == version]
    if not found:
        raise CheckpointNotFound(f"{space.name!r} version {version} does not exist")
    pinned = sorted(space.pinned())
    if space.config.remote is not None:
        await space.nodes.call("", "delete", version=version, remote=True, pinned=pinned)
    await space.nodes.call_all("delete", version=version, remote=False, pinned=pinned)


async def verify(space: Space, version: int | None) -> dict[str, Any]:
    """Read every block of a version and check it, on its nodes or on the remote tier."""
    best, notes = choose(space.name, await gather(space), version)
    remote = best.level == "durable"
    if remote:
        replies = [await space.nodes.call("", "verify", directory=best.directory, version=best.version, remote=True)]
    else:
        replies = await space.nodes.call_all("verify", directory=best.directory, version=best.version, remote=False)
    return {
        "version": best.version,
        "level": best.level,
        "nblocks": sum(r["nblocks"] for r in replies),
        "nbytes": sum(r["nbytes"] for r in replies),
        "problems": [p for r in replies for p in r["problems"]] + notes,
    }
