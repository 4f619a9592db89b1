"""The remote tier: what belongs to no node and survives the cluster.

One small interface, an adapter per kind of store. Three things matter to the callers: ``put`` returns only when the object is
durable; ``create`` makes an object only if none has that name, atomically, which is what makes a commit exclusive; and
errors that retrying cannot mend (no permission, no space) are told from passing ones by ``is_permanent``.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import fsspec
import numpy as np
import numpy.typing as npt

from veloc_dask.storage import files
from veloc_dask.storage.errors import ConfigError, TierError

_PERMANENT = {errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR}


def is_permanent(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    return isinstance(error, OSError) and error.errno in _PERMANENT


class Remote(Protocol):
    """A remote tier. Paths are relative to its root, with ``/`` between the parts."""

    label: str  # for messages; never holds credentials

    def put(self, path: str, buffers: Iterable[Any]) -> int:
        """Write an object durably, replacing it; return its length."""
        ...

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        """Several objects at once, where that saves synchronisation."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write an object durably if and only if none has that name; whether we did."""
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

    def remove_tree(self, path: str) -> None: ...


class PosixRemote:
    """A directory on a shared (or local) file system with rename, link and fsync."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.label = root
        self._known_dirs: set[str] = set()

    def open(self) -> None:
        """Create the root if it is missing, and try what a commit needs."""
        try:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            probe = os.path.join(self.root, f".veloc-probe-{os.getpid()}-{threading.get_native_id()}")
            try:
                files.write(probe, [b"probe"], sync=True, exclusive=True)
                try:
                    files.write(probe, [b"again"], sync=False, exclusive=True)
                except FileExistsError:
                    pass
                else:
                    raise ConfigError(
                        f"remote {self.root}: this file system replaces a file where link(2) must refuse; choose another"
                    )
            finally:
                if os.path.lexists(probe):
                    os.unlink(probe)
        except OSError as error:
            raise ConfigError(f"remote {self.root}: {error}; give a directory that the workers can write") from error

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def _directory(self, path: str) -> str:
        relative = os.path.dirname(path)
        full = self._path(relative)
        if full not in self._known_dirs:
            before = full
            missing = []
            while not os.path.isdir(before):
                missing.append(before)
                before = os.path.dirname(before)
            files.make_private_dirs(self.root, relative)
            for made in missing:  # a directory's own entry must be durable too
                files.sync_directory(os.path.dirname(made))
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

    def create(self, path: str, data: bytes) -> bool:
        self._directory(path)
        try:
            files.write(self._path(path), [data], sync=True, exclusive=True)
        except FileExistsError:
            return False
        return True

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        return files.read(self._path(path), offset=offset, length=length, limit=limit)

    def size(self, path: str) -> int | None:
        try:
            return os.lstat(self._path(path)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        try:
            os.unlink(self._path(path))
        except FileNotFoundError:
            return
        files.sync_directory(os.path.dirname(self._path(path)))

    def remove_tree(self, path: str) -> None:
        full = self._path(path)
        self._known_dirs = {d for d in self._known_dirs if d != full and not d.startswith(full + "/")}
        files.remove_tree(full)


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
        with self._fs.open(full, "wb") as file:
            for buffer in buffers:
                view = memoryview(buffer)
                file.write(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
                total += view.nbytes
        found = self._fs.size(full)
        if found != total:
            raise TierError(f"{self.label}/{path}: wrote {total} bytes, the store has {found}")
        return total

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        return [self.put(path, buffers) for path, buffers in objects]

    def create(self, path: str, data: bytes) -> bool:
        with self._create_lock:
            if self._fs.exists(self._path(path)):
                return False
            self.put(path, [data])
            return True

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        full = self._path(path)
        size = max(0, self._fs.size(full) - offset)
        size = size if length is None else min(size, length)
        if limit is not None and size > limit:
            raise OSError(errno.EFBIG, f"expected at most {limit} bytes, found {size}", path)
        return np.frombuffer(bytearray(self._fs.cat_file(full, start=offset, end=offset + size)), np.uint8)

    def size(self, path: str) -> int | None:
        try:
            return int(self._fs.size(self._path(path)))
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        try:
            self._fs.invalidate_cache()
            return sorted(e.rstrip("/").rpartition("/")[2] for e in self._fs.ls(self._path(path), detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        try:
            self._fs.rm_file(self._path(path))
        except FileNotFoundError:
            return

    def remove_tree(self, path: str) -> None:
        try:
            self._fs.rm(self._path(path), recursive=True)
        except FileNotFoundError:
            return


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
