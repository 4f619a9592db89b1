"""The remote tier: what belongs to no node and survives the cluster.

One small interface, an adapter per kind of store. Three things matter to the callers: ``put`` returns only when the object is
durable; ``create`` makes an object only if none has that name, atomically, which is what makes a commit exclusive; and
errors that retrying cannot mend (no permission, no space) are told from passing ones by ``is_permanent``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import fsspec
import numpy as np
import numpy.typing as npt

from veloc_dask.storage import files
from veloc_dask.storage.errors import ConfigError, IntegrityError, TierError, VelocError
from veloc_dask.storage.faults import fault_point

logger = logging.getLogger("veloc_dask")

T = TypeVar("T")

_PERMANENT = {errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR}


_PROBE = ".veloc-probe-"
RETRY_S = (0.1, 0.5, 2.0, 5.0, 10.0)  # pauses between tries of an operation
_GONE = ".gone-"  # a directory that is being deleted
_ABANDONED_S = 3600.0


def is_permanent(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    return isinstance(error, OSError) and error.errno in _PERMANENT


def retried(operation: Callable[[], T], what: str) -> T:
    """Try an operation on the remote tier a few times; errors that cannot mend, and ours, end it at once."""
    for pause in (*RETRY_S, None):
        try:
            return operation()
        except VelocError:
            raise
        except OSError as error:
            if pause is None or is_permanent(error):
                raise TierError(f"{what}: {error}") from error
            logger.info("%s failed, another try follows: %s", what, error)
            time.sleep(pause * random.uniform(0.5, 1.5))
    raise AssertionError


class Remote(Protocol):
    """A remote tier. Paths are relative to its root, with ``/`` between the parts."""

    label: str  # for messages; never holds credentials

    def put(self, path: str, buffers: Iterable[Any]) -> int:
        """Write an object durably, replacing it; return its length."""
        ...

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        """Several objects at once, where that saves synchronisation."""
        ...

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        """Write an object durably if and only if none has that name; whether we did.

        Where the store can tell, `within` is a directory that must still be there at the instant of creation:
        FileNotFoundError otherwise. After another error the object may be there all the same.
        """
        ...

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        """Bytes of an object as a writable array. FileNotFoundError if there is none."""
        ...

    def size(self, path: str) -> int | None:
        """Length of an object, None if there is none."""
        ...

    def names(self, path: str) -> list[str]:
        """The names directly below `path`, sorted; empty if there is nothing."""
        ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None:
        """Delete a directory. Where the store can, it loses its name at one instant, before anything in it goes."""
        ...

    def sweep(self, path: str) -> None:
        """Delete what killed processes have left directly in a directory: temporary files, half deleted directories."""
        ...


class PosixRemote:
    """A directory on a shared (or local) file system with rename, link and fsync."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.label = root
        self._known_dirs: set[str] = set()

    def open(self) -> None:
        """Create the root if it is missing, and try what a commit needs."""
        try:
            files.make_dirs(self.root)
            # hosts share the directory, and process ids are the same on many of them
            probe = self._probe()
            try:
                files.write(probe, [b"probe"], sync=True, exclusive=True)
                self._remove_old_probes(os.stat(probe).st_mtime)
                try:
                    files.write(probe, [b"again"], sync=False, exclusive=True)
                except FileExistsError:
                    pass
                else:
                    raise ConfigError(
                        f"remote {self.root}: this file system replaces a file where link(2) must refuse; choose another"
                    )
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(probe)
        except OSError as error:
            raise ConfigError(f"remote {self.root}: {error}; give a directory that the workers can write") from error

    def _probe(self) -> str:
        return os.path.join(self.root, f"{_PROBE}{uuid.uuid4().hex}")

    def _remove_old_probes(self, now: float) -> None:
        for entry in os.listdir(self.root):
            if entry.startswith(_PROBE) or files.is_temporary(entry):
                with contextlib.suppress(OSError):  # somebody else's, or just removed
                    if now - os.lstat(self._path(entry)).st_mtime > _ABANDONED_S:
                        os.unlink(self._path(entry))

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def _directory(self, path: str) -> str:
        """The directory of an object, created if it is missing; the entries that lead to it are durable."""
        return self._durable_directory(os.path.dirname(path))

    def _durable_directory(self, relative: str) -> str:
        full = self._path(relative).rstrip("/")
        if relative and full not in self._known_dirs:
            parent = self._durable_directory(os.path.dirname(relative))
            try:
                files.make_private_dirs(parent, os.path.basename(relative))
            except FileNotFoundError:  # somebody has deleted what we have seen: look anew at the next try
                self._known_dirs.clear()
                raise
            # also if it exists: whoever made it may have been killed before this
            files.sync_directory(parent)
            self._known_dirs.add(full)
        return full

    def put(self, path: str, buffers: Iterable[Any]) -> int:
        return self.put_many([(path, buffers)])[0]

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        written, directories = [], set()
        for path, buffers in objects:
            directory = self._directory(path)
            try:
                written.append(files.write(self._path(path), buffers, sync=True, sync_dir=False))
            except FileNotFoundError:
                self._known_dirs.clear()
                raise
            directories.add(directory)
        for directory in directories:
            files.sync_directory(directory)
        return written

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        directory = self._directory(path)
        try:
            # link(2) takes the file from where it was written: once that directory is gone, nothing appears any more
            temporary_in = self._path(within) if within else None
            files.write(self._path(path), [data], sync=True, exclusive=True, temporary_in=temporary_in)
        except FileExistsError:
            files.sync_directory(directory)  # it may be ours, and the call that created it have failed at this
            return False
        except FileNotFoundError:
            self._known_dirs.clear()
            raise
        return True

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        return files.read(self._path(path), offset=offset, length=length, limit=limit, base=self.root)

    def size(self, path: str) -> int | None:
        try:
            found = os.lstat(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError) as error:
            if not os.path.isdir(self.root):  # gone or not mounted, which is not the same as empty
                raise TierError(
                    f"remote {self.root}: is not there any more ({error}); mount it, or restore it"
                ) from error
            return []

    def remove(self, path: str) -> None:
        try:
            os.unlink(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        files.sync_directory(os.path.dirname(self._path(path)))

    def remove_tree(self, path: str) -> None:
        full = self._path(path)
        known = self._known_dirs.copy()  # other threads add to it
        self._known_dirs = {d for d in known if d != full and not d.startswith(full + "/")}
        gone = os.path.join(os.path.dirname(full), f"{_GONE}{uuid.uuid4().hex}")
        try:
            os.rename(full, gone)
        except (FileNotFoundError, NotADirectoryError):
            return
        fault_point("retention.renamed")
        files.remove_tree(gone)

    def sweep(self, path: str) -> None:
        for entry in self.names(path):
            full = os.path.join(self._path(path), entry)
            if entry.startswith(_GONE):
                files.remove_tree(full)
            elif files.is_temporary(entry) and self._age_s(full) > _ABANDONED_S:
                # if its writer was only slow, its rename or link fails, and it tries again
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(full)

    def _age_s(self, full: str) -> float:
        """The age of a file by the clock of the file server, which no other clock is compared with."""
        probe = self._probe()
        try:
            files.write(probe, [], sync=False)
            return os.stat(probe).st_mtime - os.lstat(full).st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe)


class FsspecRemote:
    """Any other fsspec file system. Creation is exclusive only among the threads of this process.

    So it is allowed for ``memory://`` in a cluster of one process, and elsewhere only if the user promises that one cluster
    at a time writes (``single_writer=True``).
    """

    _create_lock = threading.Lock()  # one for all instances: memory:// is one store per process

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **storage_options)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"remote {sanitized(url)}: {error}") from error
        self._root = self._root.rstrip("/")
        self.label = sanitized(url)

    def open(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def put(self, path: str, buffers: Iterable[Any]) -> int:
        full = self._path(path)
        self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        total = 0
        try:
            with self._fs.open(full, "wb") as file:
                for buffer in buffers:
                    view = memoryview(buffer)
                    file.write(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
                    total += view.nbytes
            found = self.size(path)
            if found != total:
                raise TierError(f"{self.label}/{path}: wrote {total} bytes, the store has {found}")
        except BaseException:
            with contextlib.suppress(OSError):  # closing the file has stored what it had got by then
                self._fs.rm_file(full)
            raise
        return total

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        return [self.put(path, buffers) for path, buffers in objects]

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        with self._create_lock:
            if self.size(path) is not None:
                return False
            self.put(path, [data])
            return True

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        found = self.size(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.label}/{path}")
        size = max(0, found - offset)
        size = size if length is None else min(size, length)
        if limit is not None and size > limit:
            raise IntegrityError(f"{self.label}/{path}: expected at most {limit:,} bytes, found {size:,}")
        # an empty range is refused by some stores
        data = self._fs.cat_file(self._path(path), start=offset, end=offset + size) if size else b""
        return np.frombuffer(bytearray(data), np.uint8)

    def size(self, path: str) -> int | None:
        try:
            self._fs.invalidate_cache()  # a listing from before says nothing about now
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, path: str) -> list[str]:
        try:
            self._fs.invalidate_cache()
            return sorted(e.rstrip("/").rpartition("/")[2] for e in self._fs.ls(self._path(path), detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._fs.rm_file(self._path(path))

    def remove_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._fs.rm(self._path(path), recursive=True)

    def sweep(self, path: str) -> None:
        """There is nothing to find: objects are written under their own names."""


def sanitized(url: str) -> str:
    """A URL without user, password and query, for messages."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def is_memory(url: str) -> bool:
    return url.startswith("memory:")


def posix_path(url: str) -> str | None:
    """The directory that a plain path or a file URL names, None for other URLs."""
    if url.startswith(("file://", "local://")):
        url = url.partition("://")[2]
    elif "://" in url or url.startswith("memory:"):
        return None
    return os.path.abspath(os.path.expanduser(os.path.expandvars(url)))


def check_url(url: str, *, single_writer: bool) -> None:
    """Raise ConfigError unless a commit on this store can be exclusive, or the user promised a single writer."""
    if posix_path(url) is not None or is_memory(url) or single_writer:
        return
    raise ConfigError(
        f"remote {sanitized(url)}: this version of veloc_dask creates a version exclusively only on file systems; pass "
        "single_writer=True if no two clusters ever save under one name there at the same time"
    )


def open_remote(url: str, storage_options: Mapping[str, Any] | None = None) -> Remote:
    """Open a remote tier, creating its root; ConfigError if that is impossible."""
    path = posix_path(url)
    remote = PosixRemote(path) if path is not None else FsspecRemote(url, storage_options or {})
    remote.open()
    return remote
