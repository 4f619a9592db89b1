"""What goes: versions beyond ``keep``, and what dead attempts left behind.

Order on the remote tier: the root first (the version is out of the listings at once), then the blocks; a crash in between
leaves only an attempt without a root. An attempt without a root is deleted only where it can never commit: its version's
place is taken by another root or by a tombstone that we create first, and only for versions not above the newest committed
one (numbers only grow, so no living run still wants those). The newest version is never deleted. Directories in `pinned`
back live keys or restored graphs and stay. Whatever a crash leaves, the next round removes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from veloc_dask.storage import commit, files, layout, processes
from veloc_dask.storage import root as roots
from veloc_dask.storage.errors import IntegrityError
from veloc_dask.storage.faults import fault_point
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
    remote.sweep(name)
    remote.sweep(f"{name}/runs")
    entries = remote.names(name)
    versions: dict[int, str] = {}  # with their directories, ascending
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
            versions[version] = found.directory
            live.add(found.directory)
        elif found is not None:
            _remove_notes(remote, name, version)  # a tombstone needs none
    newest = max(versions, default=-1)
    deleted = []
    for entry in entries if run is not None else ():
        attempt = layout.parse_attempt(entry)
        if attempt is None or attempt[0] > newest or entry in live or entry in pinned or entry in active:
            continue
        if attempt[0] in taken:
            # a note outlives the directory: the root that keeps this attempt from committing must leave a tombstone
            remote.put(f"{name}/{entry}{_DEAD}", [b""])
        elif not remote.create(f"{name}/{layout.root_name(attempt[0])}", _tombstone(name, attempt[0], run)):
            continue  # the slow writer was faster: it is a version now
        fault_point("retention.noted")
        remote.remove_tree(f"{name}/{entry}")
        fault_point("retention.deleted")
        deleted.append(entry)
    gone = []
    for version in list(versions)[:-keep] if keep else []:
        directory = versions[version]
        if directory in active or forget_remote(remote, name, version, run=run or 0) != directory:
            continue
        gone.append(version)
        if directory not in pinned:
            remove_forgotten(remote, name, directory, run=run or 0)
            deleted.append(directory)
    return Removed(tuple(gone), tuple(deleted))


def remove_forgotten(remote: Remote, name: str, directory: str, *, run: int) -> None:
    """Delete the directory that `forget_remote` has returned, or that of an attempt that is given up."""
    remote.remove_tree(f"{name}/{directory}")
    fault_point("retention.deleted")
    attempt = layout.parse_attempt(directory)
    assert attempt is not None
    # a worker that was told to commit this attempt, and slept while another one did, may have created the root again
    # before the directory went
    again = commit.read_root(remote, name, attempt[0])
    if isinstance(again, roots.Root) and again.directory == directory:
        forget_remote(remote, name, attempt[0], run=run)


def discard_remote(remote: Remote, name: str, directory: str, *, run: int, may_commit: bool) -> bool:
    """Delete what an attempt that was given up has left, unless it turns out to be a version; whether it is gone.

    Parameters
    ----------
    may_commit
        Whether somebody was told to commit it, so that it may become a version at any moment. Its place is then taken with
        a tombstone first, which uses the number up.
    """
    attempt = layout.parse_attempt(directory)
    assert attempt is not None
    version = attempt[0]
    if may_commit and remote.create(f"{name}/{layout.root_name(version)}", _tombstone(name, version, run)):
        found = None
    else:
        found = commit.read_root(remote, name, version)
    if isinstance(found, roots.Root):
        if found.directory == directory:
            return False
        if may_commit:
            remote.put(f"{name}/{directory}{_DEAD}", [b""])
    remove_forgotten(remote, name, directory, run=run)
    return True


def _notes(remote: Remote, name: str, version: int) -> list[str]:
    prefix = layout.attempt_name(version, "")
    return [e for e in remote.names(name) if e.startswith(prefix) and e.endswith(_DEAD)]


def _remove_notes(remote: Remote, name: str, version: int) -> None:
    for note in _notes(remote, name, version):
        remote.remove(f"{name}/{note}")


def forget_remote(remote: Remote, name: str, version: int, *, run: int) -> str | None:
    """Take a version out of the listings; the directory that may now be deleted, None if there is no such version."""
    found = commit.read_root(remote, name, version)
    if not isinstance(found, roots.Root):
        return None
    place = f"{name}/{layout.root_name(version)}"
    if _notes(remote, name, version):
        remote.put(place, [_tombstone(name, version, run)])
        fault_point("retention.hidden")
        _remove_notes(remote, name, version)
    else:
        remote.remove(place)
        fault_point("retention.hidden")
    return found.directory


def _tombstone(name: str, version: int, run: int | None) -> bytes:
    return roots.encode(roots.Tombstone(roots.FORMAT, roots.FORMAT_VERSION, name, version, run or 0))


def local_root(node: Node, name: str, directory: str) -> roots.Root | None:
    """The valid root of a version on this node's tiers, None if there is none."""
    for tier, path in node.copies(f"{name}/{directory}/root.json"):
        try:
            found = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES, base=tier.home), where=path)
        except FileNotFoundError:
            continue  # deleted at this moment
        except OSError as error:
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
    deleted = []
    for entry in going:
        if entry in active or owned_elsewhere(node, name, entry, run_uuid):
            continue
        try:
            if entry in pinned:  # out of the listings; its blocks stay for those who need them
                node.remove(f"{name}/{entry}/root.json")
            else:
                forget_local(node, name, entry)
                deleted.append(entry)
        except OSError as error:  # one tier that is read-only or failing keeps nothing from the others
            logger.warning("%s of %s cannot be removed from this node for now: %s", entry, name, error)
    return Removed(tuple(v for v, e in complete if e in deleted), tuple(deleted))


def forget_local(node: Node, name: str, directory: str) -> None:
    """Delete a directory on all tiers of this node: its root first, so that a crash leaves no version with holes."""
    node.remove(f"{name}/{directory}/root.json")
    fault_point("retention.local_hidden")
    attempt = layout.parse_attempt(directory)
    if attempt is not None:
        claim = f"{name}/{layout.root_name(attempt[0])}"
        for _, path in list(node.copies(claim)):
            try:
                found = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES), where=path)
            except OSError:
                continue
            if isinstance(found, roots.Root) and found.directory == directory:
                node.remove(claim)
    node.remove_tree(f"{name}/{directory}")


def own(node: Node, name: str, directory: str, run_uuid: str) -> None:
    """Leave a note in a directory that this process writes to it, so that no other cluster collects it while we live."""
    node.put(f"{name}/{directory}/{_OWNER}{run_uuid}-{processes.token()}", b"")


def owned_elsewhere(node: Node, name: str, directory: str, run_uuid: str) -> bool:
    """Whether a process of another cluster that writes to the directory lives, or cannot be judged from here."""
    for entry in node.entries(f"{name}/{directory}"):
        if not entry.startswith(_OWNER):
            continue
        owner, namespace, pid, start = [*entry.removeprefix(_OWNER).split("-"), "", "", ""][:4]
        # a process in another container cannot be judged: its id means nothing here
        if owner != run_uuid and not processes.is_dead(namespace, pid, start):
            return True
    return False
