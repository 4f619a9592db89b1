"""What goes: versions beyond ``keep``, and what dead attempts left behind.

Order on the remote tier: the root first (the version is out of the listings at once), then the blocks; a crash in between
leaves only an attempt without a root. An attempt without a root is deleted only where it can never commit: its version's
place is taken by another root or by a tombstone that we create first, and only for versions not above the newest committed
one (numbers only grow, so no living run still wants those). The newest version is never deleted. Directories in `pinned`
back live keys or restored graphs and stay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

import msgspec

from veloc_dask.storage import commit, files, layout
from veloc_dask.storage import root as roots
from veloc_dask.storage.board import process_start
from veloc_dask.storage.errors import IntegrityError
from veloc_dask.storage.remote import Remote
from veloc_dask.storage.tiers import Node

logger = logging.getLogger("veloc_dask")

_DEAD = ".dead"
_OWNER = ".owner-"


class Removed(msgspec.Struct, frozen=True):
    """What a round of retention did."""

    versions: tuple[int, ...] = ()  # out of the listings
    directories: tuple[str, ...] = ()  # deleted with all that was in them


def retain_remote(
    remote: Remote, name: str, *, keep: int, run: int | None, pinned: Collection[str], active: Collection[str]
) -> Removed:
    """Keep the newest `keep` versions of `name`; collect attempts that are dead for certain.

    Parameters
    ----------
    run
        Our run. If a later one exists, nothing is touched: the name is its business now. None (we never saved under the
        name): attempts are left alone too, since they may be those of a living run.
    pinned
        Directories whose blocks must stay although their version goes.
    active
        Directories of attempts under way in this cluster.
    """
    if run is not None and commit.newest_run(remote, name) > run:
        return Removed()
    entries = remote.names(name)
    versions: list[int] = []
    live: set[str] = set()  # directories of versions that stay
    taken = set()
    for version in sorted(v for e in entries if (v := layout.parse_root(e)) is not None):
        taken.add(version)
        try:
            found = commit.read_root(remote, name, version)
        except IntegrityError as error:
            logger.warning("retention leaves a damaged root alone: %s", error)
            live |= {e for e in entries if (a := layout.parse_attempt(e)) is not None and a[0] == version}
            continue
        if isinstance(found, roots.Root):
            versions.append(version)
            live.add(found.directory)
    newest = versions[-1] if versions else -1
    deleted = []
    for entry in entries if run is not None else ():
        attempt = layout.parse_attempt(entry)
        if attempt is None or attempt[0] > newest or entry in live or entry in pinned or entry in active:
            continue
        place = f"{name}/{layout.root_name(attempt[0])}"
        if attempt[0] in taken:
            # a note outlives the directory: the root that keeps this attempt from committing must leave a tombstone
            remote.put(f"{name}/{entry}{_DEAD}", [b""])
        elif not remote.create(place, _tombstone(name, attempt[0], run)):
            continue  # the slow writer was faster: it is a version now
        remote.remove_tree(f"{name}/{entry}")
        deleted.append(entry)
    gone = []
    for version in versions[:-keep] if keep else []:
        directory = forget_remote(remote, name, version, run=run or 0)
        if directory is None:
            continue
        gone.append(version)
        if directory not in pinned:
            remote.remove_tree(f"{name}/{directory}")
            deleted.append(directory)
    return Removed(tuple(gone), tuple(deleted))


def forget_remote(remote: Remote, name: str, version: int, *, run: int) -> str | None:
    """Take a version out of the listings; the directory that may now be deleted, None if there is no such version."""
    found = commit.read_root(remote, name, version)
    if not isinstance(found, roots.Root):
        return None
    place = f"{name}/{layout.root_name(version)}"
    prefix = layout.attempt_name(version, "")
    notes = [e for e in remote.names(name) if e.startswith(prefix) and e.endswith(_DEAD)]
    if notes:
        remote.put(place, [_tombstone(name, version, run)])
        for note in notes:
            remote.remove(f"{name}/{note}")
    else:
        remote.remove(place)
    return found.directory


def _tombstone(name: str, version: int, run: int | None) -> bytes:
    return roots.encode(roots.Tombstone(roots.FORMAT, roots.FORMAT_VERSION, name, version, run or 0))


def local_root(node: Node, name: str, directory: str) -> roots.Root | None:
    """The valid root of a version on this node's tiers, None if there is none."""
    for tier, path in node.copies(f"{name}/{directory}/root.json"):
        try:
            found = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES), where=path)
        except (IntegrityError, OSError) as error:
            logger.warning("a damaged root on tier %s is not used: %s", tier.path, error)
            continue
        if isinstance(found, roots.Root) and found.name == name and found.directory == directory:
            return found
    return None


def retain_local(
    node: Node, name: str, *, keep: int, pinned: Collection[str], active: Collection[str], run_uuid: str
) -> Removed:
    """The same on this node's tiers; what other living clusters of this node write or hold stays."""
    complete: list[tuple[int, str]] = []
    others = []
    for entry in node.entries(name):
        attempt = layout.parse_attempt(entry)
        if attempt is not None and local_root(node, name, entry) is not None:
            complete.append((attempt[0], entry))
        elif attempt is not None or layout.parse_protected(entry) not in (None, run_uuid):
            others.append(entry)
    stay = set(sorted({v for v, _ in complete})[-keep:])
    going = others + [entry for version, entry in complete if version not in stay]
    deleted = [e for e in going if e not in pinned and e not in active and not owned_elsewhere(node, name, e, run_uuid)]
    for entry in deleted:
        forget_local(node, name, entry)
    for entry in going:
        if entry in pinned:  # out of the listings; its blocks stay for those who need them
            node.remove(f"{name}/{entry}/root.json")
    return Removed(tuple(v for v, e in complete if e in deleted), tuple(deleted))


def forget_local(node: Node, name: str, directory: str) -> None:
    """Delete a directory on all tiers of this node: its root first, so that a crash leaves no version with holes."""
    node.remove(f"{name}/{directory}/root.json")
    attempt = layout.parse_attempt(directory)
    if attempt is not None:
        claim = f"{name}/{layout.root_name(attempt[0])}"
        for _, path in list(node.copies(claim)):
            try:
                found = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES), where=path)
            except (IntegrityError, OSError):
                continue
            if isinstance(found, roots.Root) and found.directory == directory:
                node.remove(claim)
    node.remove_tree(f"{name}/{directory}")


def own(node: Node, name: str, directory: str, run_uuid: str) -> None:
    """Leave a note in a directory that this process writes to it, so that no other cluster collects it while we live."""
    start = process_start(os.getpid())
    node.put(f"{name}/{directory}/{_OWNER}{run_uuid}-{_namespace()}-{os.getpid()}-{start}", b"")


def owned_elsewhere(node: Node, name: str, directory: str, run_uuid: str) -> bool:
    """Whether a process of another cluster that writes to the directory lives, or cannot be judged from here."""
    for entry in node.entries(f"{name}/{directory}"):
        if not entry.startswith(_OWNER):
            continue
        owner, namespace, pid, start = [*entry.removeprefix(_OWNER).split("-"), "", "", ""][:4]
        if owner == run_uuid:
            continue
        if namespace != _namespace() or not pid.isdigit() or not start.isdigit():
            return True  # another container: its process ids mean nothing here
        if process_start(int(pid)) == int(start) != 0:
            return True
    return False


def _namespace() -> str:
    """The process id namespace that this process lives in."""
    try:
        return "".join(c for c in os.readlink("/proc/self/ns/pid") if c.isdigit())
    except OSError:
        return "0"
