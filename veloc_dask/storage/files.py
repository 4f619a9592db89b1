"""The only place that writes, reads and creates files on a mounted file system.

Invariants: a file appears under its name complete or not at all (temporary name, byte count, rename or link); with
``sync=True`` it and its directory entry have reached the device before the call returns; after any error the temporary file
is gone and a retry uses a new one (a failed fsync must never be retried on the same file: the kernel may have dropped the
dirty pages and report success). Directories are 0700 and files 0600 whatever the umask; what somebody else owns or can
write is refused; links are never followed in the last component.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from veloc_dask.storage.errors import TierError

_PIECE = 1 << 30  # Linux writes at most 2 GiB - 4 KiB with one call


def check_private(path: str) -> None:
    """Raise TierError unless `path` is a real directory of ours that nobody else can write."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise TierError(f"{path}: expected a directory, found a link or a file; remove it or choose another place")
    if found.st_uid != os.geteuid():
        raise TierError(
            f"{path}: expected an owner with uid {os.geteuid()}, found {found.st_uid}; choose another place"
        )
    if found.st_mode & 0o022:
        raise TierError(
            f"{path}: group or others may write to it (mode {stat.S_IMODE(found.st_mode):04o}); "
            "chmod 0700, or choose another place"
        )


def make_private_dirs(base: str, relative: str) -> str:
    """Create `relative` below the existing directory `base`, each part 0700 and checked; return the whole path."""
    path = base
    for part in PurePath(relative).parts:
        path = os.path.join(path, part)
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # the umask may have taken bits of the owner
        except FileExistsError:
            check_private(path)
    return path


def _write_all(fd: int, buffers: Iterable[Any]) -> int:
    total = 0
    for buffer in buffers:
        view = memoryview(buffer)
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        done = 0
        while done < len(view):
            done += os.write(fd, view[done : done + _PIECE])
        total += done
    return total


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: str, buffers: Iterable[Any], *, sync: bool, sync_dir: bool = True, exclusive: bool = False) -> int:
    """Write `buffers` to `path` so that it appears complete or not at all; return the number of bytes.

    Parameters
    ----------
    path
        The final name. Its directory exists.
    buffers
        Bytes-like objects, written in order; consumed once.
    sync
        Flush the file to the device, and its directory unless `sync_dir` is false (the caller then does it for many).
    exclusive
        Raise FileExistsError if `path` exists, atomically (link(2)); otherwise it is replaced.
    """
    directory = os.path.dirname(path)
    # outside of the object's own names, so that it can never be taken for a chunk
    temporary = os.path.join(directory, f".tmp-{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)
            total = _write_all(fd, buffers)
            if sync:
                os.fsync(fd)
            found = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if found != total:
            raise OSError(errno.EIO, f"wrote {total} bytes, the file has {found}", path)
        if exclusive:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if sync and sync_dir:
        sync_directory(directory)
    return total


def read(path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None) -> npt.NDArray[np.uint8]:
    """`length` bytes (None: all) of a file from `offset` on, as a writable array; fewer if the file ends before.

    More than `limit` bytes: OSError before anything is allocated.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        size = max(0, found.st_size - offset)
        if length is not None:
            size = min(size, length)
        if limit is not None and size > limit:
            raise OSError(errno.EFBIG, f"expected at most {limit} bytes, found {size}", path)
        data = np.empty(size, np.uint8)  # a bytearray would be zeroed first, at half the speed
        done = 0
        while done < size:
            n = os.preadv(fd, [data[done : done + _PIECE].data], offset + done)
            if not n:
                break
            done += n
        return data[:done]
    finally:
        os.close(fd)


def sizes(directory: str) -> Iterator[tuple[str, int]]:
    """Path and size of each regular file below `directory`; a file that vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from sizes(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue


def remove_tree(path: str) -> int:
    """Delete a directory of ours with all that is in it; return the bytes freed. Missing: 0."""
    freed = sum(n for _, n in sizes(path))
    # a writer that has not noticed yet may add a file while we delete: try again a few times
    for _ in range(5):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return freed
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return freed
    return freed
