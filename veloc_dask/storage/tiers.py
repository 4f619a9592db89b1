"""The node-local tiers: opening them, their capacity and health, and writing and finding files on them.

A tier is a directory given by the user; ours is ``<tier>/veloc-<uid>/`` in it, with one subdirectory per node. The node's
uuid lies on the tiers themselves (``node.json``), so a new process, or a new cluster with other names and addresses, finds
again what this node holds. Owned by the worker of a node; used from its capture, flush and control threads.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from veloc_dask.storage import files, layout
from veloc_dask.storage.board import Board
from veloc_dask.storage.errors import ConfigError, TierError
from veloc_dask.storage.faults import fault_point
from veloc_dask.storage.placement import Device

logger = logging.getLogger("veloc_dask")

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NEVER = 1 << 62


class TierConfig(msgspec.Struct, frozen=True):
    """A tier as the user configured it: a directory, and how many bytes it may hold (None: what fits)."""

    path: str
    capacity_nbytes: int | None = None


class _Marker(msgspec.Struct, frozen=True):
    node: str
    host: str  # for people; another host may carry on with the same disk


def is_ram(path: str) -> bool:
    """Whether `path` lies on a RAM file system, told from the mount table (Linux; elsewhere False)."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mounts") as mounts:
            for line in mounts:
                _, point, fstype = line.split()[:3]
                point = point.replace("\\040", " ")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= best:
                    best, kind = len(point), fstype
    except OSError:
        return False
    return kind in ("tmpfs", "ramfs")


class Tier:
    """One opened tier of this node.

    Attributes
    ----------
    home
        ``<tier>/veloc-<uid>/<node uuid>``, below which all checkpoint names lie.
    capacity_nbytes
        What all processes of the node together may hold here.
    """

    def __init__(self, path: str, node: str, capacity_nbytes: int, ram: bool) -> None:
        self.path = path
        self.ram = ram
        self.capacity_nbytes = capacity_nbytes
        base = os.path.join(path, f"veloc-{os.geteuid()}")
        self.home = files.make_private_dirs(base, node)
        self.board = Board(files.make_private_dirs(base, f"board-{node}"), self.home)
        self._known_dirs: set[str] = set()
        self._lock = threading.Lock()
        self._blocked_until = 0.0
        self._pause_s = 0.0
        self._trouble = ""

    def device(self) -> Device:
        """The tier's state for the placement policy."""
        used = self.board.used_nbytes()
        capacity = self.capacity_nbytes
        try:
            stat = os.statvfs(self.home)
            # leave a little to others who share the device: filling it to the last byte breaks them
            spare = min(256 << 20, stat.f_blocks * stat.f_frsize // 20)
            free = stat.f_bavail * stat.f_frsize - spare - self.board.pending_nbytes()
            capacity = min(capacity, used + max(0, free))
        except OSError as error:
            self._failed(error)
        return Device(self.path, capacity, used, time.monotonic() >= self._blocked_until)

    @property
    def trouble(self) -> str:
        """Why the tier is set aside, "" if it is not."""
        with self._lock:
            return self._trouble if time.monotonic() < self._blocked_until else ""

    def _failed(self, error: OSError) -> None:
        """Leave the tier alone for a while; the pause doubles up to a minute while it keeps failing."""
        with self._lock:
            first = self._pause_s == 0
            self._pause_s = min(60.0, max(1.0 if error.errno in _FULL else 5.0, 2 * self._pause_s))
            self._blocked_until = time.monotonic() + self._pause_s
            self._trouble = str(error)
        if first:
            logger.warning("tier %s is not used for now: %s", self.path, error)

    def directory(self, relative: str) -> str:
        """Create and return a directory below ``home``."""
        path = os.path.join(self.home, relative)
        if path not in self._known_dirs:
            files.make_private_dirs(self.home, relative)
            self._known_dirs.add(path)
        return path

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve room for a `write`; False if other processes have taken it meanwhile. OSError: the tier is set aside."""
        try:
            if self.capacity_nbytes >= _NEVER:
                self.board.reserve(nbytes)
            elif not self.board.try_reserve(nbytes, self.capacity_nbytes):
                return False
        except OSError as error:
            self._failed(error)
            raise
        fault_point("tier.reserved")
        return True

    def write(self, relative: str, buffers: Iterable[object], nbytes: int, *, reserved: bool = False) -> int:
        """Write a file of `nbytes` bytes below ``home``, not synced (level ``local`` does not promise it).

        `buffers` may be iterated twice. With `reserved` the caller has reserved the bytes on the board already.
        """
        try:
            if not reserved:
                self.board.reserve(nbytes)
            written = 0
            try:
                replaced = self._size(relative)
                try:
                    written = self._write(relative, buffers)
                except (
                    FileNotFoundError
                ):  # somebody removed the directory (retention, or a person): make it again, once
                    self._known_dirs.clear()
                    written = self._write(relative, buffers)
                fault_point("tier.before_settle")
            finally:
                self.board.settle(nbytes, written)
            if replaced:
                self.board.free(replaced)
        except OSError as error:
            self._failed(error)
            raise
        self._pause_s = 0.0
        return written

    def create(self, relative: str, data: bytes) -> bool:
        """Write a small file below ``home`` if and only if none has that name; whether we did."""
        directory, _, entry = relative.rpartition("/")
        self.board.reserve(len(data))
        written = 0
        try:
            written = files.write(os.path.join(self.directory(directory), entry), [data], sync=False, exclusive=True)
        except FileExistsError:
            return False
        except FileNotFoundError:
            self._known_dirs.clear()
            raise
        finally:
            self.board.settle(len(data), written)
        return True

    def _write(self, relative: str, buffers: Iterable[object]) -> int:
        directory, _, entry = relative.rpartition("/")
        return files.write(os.path.join(self.directory(directory), entry), buffers, sync=False)

    def _size(self, relative: str) -> int:
        try:
            return os.lstat(os.path.join(self.home, relative)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def find(self, relative: str) -> str | None:
        """The path of a file below ``home``, None if it is not here."""
        path = os.path.join(self.home, relative)
        return path if os.path.isfile(path) else None

    def listdir(self, relative: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self.home, relative)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, relative: str) -> None:
        """Delete one file, if it is here."""
        path = os.path.join(self.home, relative)
        try:
            size = os.lstat(path).st_size
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        self.board.free(size)

    def remove_tree(self, relative: str) -> None:
        path = os.path.join(self.home, relative)
        known = self._known_dirs.copy()  # other threads add to it
        self._known_dirs = {d for d in known if d != path and not d.startswith(path + "/")}
        self.board.free(files.remove_tree(path))

    def close(self) -> None:
        self.board.close()


class Node:
    """The tiers of this node, fast first, and its identity."""

    def __init__(self, node: str, tiers: Sequence[Tier]) -> None:
        self.uuid = node
        self.tiers = tuple(tiers)

    def copies(self, relative: str) -> Iterator[tuple[Tier, str]]:
        """Each tier that has the file, with its path there."""
        for tier in self.tiers:
            path = tier.find(relative)
            if path is not None:
                yield tier, path

    def put(self, relative: str, data: bytes) -> None:
        """Write a small file (root, table, zarr.json) to the fastest tier that takes it.

        Capacities hold for blocks: where no tier has room, the small files of a version may go over them.
        """
        errors = []
        for tier in sorted(self.tiers, key=lambda t: self._reluctance(t, len(data))):
            try:
                tier.write(relative, [data], len(data))
            except OSError as error:
                errors.append(f"tier {tier.path}: {error}")
            else:
                return
        raise TierError(f"no local tier of this node took {relative}: " + "; ".join(errors or ["there is none"]))

    @staticmethod
    def _reluctance(tier: Tier, nbytes: int) -> tuple[bool, bool]:
        device = tier.device()
        return not device.usable, device.used_nbytes + nbytes > device.capacity_nbytes

    def entries(self, relative: str) -> list[str]:
        """The names below `relative` on any tier."""
        return sorted({e for tier in self.tiers for e in tier.listdir(relative)})

    def remove_tree(self, relative: str) -> None:
        """Delete a directory on every tier; a tier that refuses does not keep it on the others, but is reported."""
        self._on_each(lambda tier: tier.remove_tree(relative))

    def remove(self, relative: str) -> None:
        """Delete a file on every tier; a tier that refuses does not keep it on the others, but is reported."""
        self._on_each(lambda tier: tier.remove(relative))

    def _on_each(self, operation: Callable[[Tier], None]) -> None:
        errors = []
        for tier in self.tiers:
            try:
                operation(tier)
            except OSError as error:
                errors.append((tier, error))
        if errors:
            raise TierError("; ".join(f"tier {tier.path}: {error}" for tier, error in errors)) from errors[0][1]

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _read_marker(path: str) -> str | None:
    try:
        marker = msgspec.json.decode(files.read(path, limit=4096).tobytes(), type=_Marker)
        return uuid.UUID(marker.node).hex
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError, OSError) as error:
        raise ConfigError(
            f"{path}: not a node marker of veloc_dask ({error}); remove the directory or choose another tier"
        ) from error


def open_node(
    configs: Sequence[TierConfig],
    *,
    ram_budget_nbytes: int | None = None,
    ram_budget_reason: str = "",
    forbidden: Sequence[str] = (),
) -> Node:
    """Open the tiers of this node, creating what is missing.

    Parameters
    ----------
    configs
        The tiers, fast first. ``$VARIABLES`` and ``~`` are those of this process.
    ram_budget_nbytes
        What tiers in RAM may hold together, since it is the memory that the workers also use. None: unknown, no limit.
    ram_budget_reason
        The arithmetic behind it, for the error message.
    forbidden
        Directories that a tier may not lie in (Dask purges its ``local_directory``).

    Raises
    ------
    ConfigError
        A tier cannot be used: not ours, not writable, in a forbidden place, or larger than the memory it would need.
    """
    paths, capacities, rams = [], [], []
    budget = ram_budget_nbytes
    for config in configs:
        path = os.path.abspath(os.path.expanduser(os.path.expandvars(config.path)))
        if "$" in path:
            raise ConfigError(f"tier {config.path!r}: this variable is not set on {socket.gethostname()}")
        for place in forbidden:
            if os.path.commonpath([os.path.realpath(place), os.path.realpath(path)]) == os.path.realpath(place):
                raise ConfigError(
                    f"tier {path}: lies in Dask's local_directory {place}, which Dask deletes; choose another place"
                )
        try:
            files.make_dirs(path)
            files.make_private_dirs(path, f"veloc-{os.geteuid()}")
            stat = os.statvfs(path)
        except OSError as error:
            raise ConfigError(f"tier {path}: {error}; give a directory that this user can write") from error
        ram = is_ram(path)
        capacity = config.capacity_nbytes
        if ram and budget is not None:
            if capacity is not None and capacity > budget:
                raise ConfigError(
                    f"tier {path}: {capacity:,} bytes in RAM do not fit: {ram_budget_reason}; "
                    "give the workers a smaller memory_limit, or the tier a smaller capacity"
                )
            capacity = budget if capacity is None else capacity
            capacity = min(capacity, stat.f_blocks * stat.f_frsize)
            budget -= capacity
            if capacity <= 0:
                raise ConfigError(
                    f"tier {path}: no memory is left for a tier in RAM: {ram_budget_reason}; "
                    "give the workers a smaller memory_limit, or choose a tier on disk"
                )
        paths.append(path)
        rams.append(ram)
        capacities.append(_NEVER if capacity is None else capacity)
    markers = [os.path.join(p, f"veloc-{os.geteuid()}", "node.json") for p in paths]
    known = [_read_marker(m) for m in markers]
    found = [node for node in known if node is not None]
    node = found[0] if found else uuid.uuid4().hex
    document = msgspec.json.encode(_Marker(node, socket.gethostname()))
    for position, marker in enumerate(markers):
        if known[position] is not None:
            continue  # a worker that starts again finds its tier, even if that is full by now
        try:
            files.write(marker, [document], sync=True, exclusive=True)
        except FileExistsError:
            if not found:  # another process of this node was faster: take its identity
                node = _read_marker(marker) or node
                document = msgspec.json.encode(_Marker(node, socket.gethostname()))
                found = [node]
        except OSError as error:
            raise ConfigError(f"tier {paths[position]}: {error}; give a directory that this user can write") from error
    opened: list[Tier] = []
    try:
        for path, capacity, ram in zip(paths, capacities, rams, strict=True):
            opened.append(Tier(path, node, capacity, ram))
    except (OSError, TierError) as error:
        for tier in opened:
            tier.close()
        raise ConfigError(f"tier {path}: {error}") from error
    return Node(node, opened)


def block_path(name: str, directory: str, object_path: str) -> str:
    """Where an object of a version lies, relative to a tier's home or to the remote root."""
    return f"{name}/{directory}/{layout.check_object(object_path)}"
