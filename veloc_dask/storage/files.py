"""The only place that writes, reads and creates files on a mounted file system.

Invariants: a file appears under its name complete or not at all (temporary name, byte count, rename or link); with
``sync=True`` it and its directory entry have reached the device before the call returns; after any error the temporary file
is gone and a retry uses a new one (a failed fsync must never be retried on the same file: the kernel may have dropped the
dirty pages and report success). Directories are 0700 and files 0600 whatever the umask; what somebody else owns or can
write is refused; links are never followed. The name of a temporary file says which process made it, so that those of killed
processes are found (`remove_temporary`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from veloc_dask.storage import processes
from veloc_dask.storage.errors import IntegrityError, TierError
from veloc_dask.storage.faults import fault_point

_PIECE = 1 << 30  # Linux writes at most 2 GiB - 4 KiB with one call
_TEMPORARY = ".tmp-"


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


def make_dirs(path: str) -> None:
    """Create a directory that the user has named, and what is missing above it; what exists stays as it is."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for part in reversed(missing):
        try:
            os.mkdir(part, 0o700)
        except FileExistsError:
            if not os.path.isdir(part):
                raise
        else:
            os.chmod(part, 0o700)  # the umask may have taken bits of the owner


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
            if os.lstat(path).st_mode & 0o700 != 0o700:  # its maker was killed, or is about to do it
                os.chmod(path, 0o700)
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


def write(
    path: str,
    buffers: Iterable[Any],
    *,
    sync: bool,
    sync_dir: bool = True,
    exclusive: bool = False,
    temporary_in: str | None = None,
) -> int:
    """Write `buffers` to `path` so that it appears complete or not at all; return the number of bytes.

    After an error the file may be there all the same, complete, but perhaps not durable: a caller for whom that matters
    looks again.

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
    temporary_in
        Another directory of the same file system for the temporary file. If that directory is removed or renamed before
        the end, the file does not appear: FileNotFoundError.
    """
    directory = os.path.dirname(path)
    # outside of the object's own names, so that it can never be taken for a chunk
    temporary = os.path.join(temporary_in or directory, f"{_TEMPORARY}{processes.token()}-{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fault_point("file.opened", path=path, temporary=temporary)
            os.fchmod(fd, 0o600)
            total = _write_all(fd, buffers)
            fault_point("file.written", path=path, temporary=temporary)
            if sync:
                os.fsync(fd)
            found = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if found != total:
            raise OSError(errno.EIO, f"wrote {total} bytes, the file has {found}", path)
        fault_point("file.before_rename", path=path, temporary=temporary)
        if exclusive:
            _link(temporary, path)
        else:
            os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to know
            os.unlink(temporary)
        raise
    fault_point("file.after_rename", path=path, temporary=temporary)
    if sync and sync_dir:
        sync_directory(directory)
    fault_point("file.synced", path=path, temporary=temporary)
    return total


def _link(temporary: str, path: str) -> None:
    """Give a file its final name unless that is taken."""
    try:
        os.link(temporary, path)
    except OSError:
        # NFS sends a call again whose reply was lost, and then says that the name is taken: by us
        if os.lstat(temporary).st_nlink != 2:
            raise
    with contextlib.suppress(OSError):  # created it is; the second name is found as that of a dead process some day
        os.unlink(temporary)


def _open_for_reading(path: str, base: str | None) -> int:
    # O_NONBLOCK: opening a named pipe that somebody has planted would wait for ever
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    place = path
    above = None
    try:
        if base is None:
            return os.open(path, flags)
        *parents, entry = os.path.relpath(path, base).split(os.sep)
        place = base
        above = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parents:
            place = os.path.join(place, part)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            above, done = below, above
            os.close(done)
        place = path
        return os.open(entry, flags, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        if os.path.islink(place):
            raise IntegrityError(
                f"{place}: expected no link, found one; links are never followed, remove what it is part of"
            ) from error
        raise FileNotFoundError(errno.ENOENT, "a part of the path is a file", path) from error
    finally:
        if above is not None:
            os.close(above)


def read(
    path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None, base: str | None = None
) -> npt.NDArray[np.uint8]:
    """`length` bytes (None: all) of a file from `offset` on, as a writable array; fewer if the file ends before.

    Parameters
    ----------
    limit
        More than this many bytes: IntegrityError before anything is allocated.
    base
        A directory above `path`, below which no part of the path may be a link; None: the last part may not.

    Raises
    ------
    IntegrityError
        It is no regular file, a link lies in the way, or it is larger than `limit`.
    """
    fd = _open_for_reading(path, base)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{path}: expected a regular file, found {stat.filemode(found.st_mode)}")
        size = max(0, found.st_size - offset)
        if length is not None:
            size = min(size, length)
        if limit is not None and size > limit:
            raise IntegrityError(f"{path}: expected at most {limit:,} bytes, found {size:,}")
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


def remove_temporary(directory: str) -> int:
    """Delete what processes that are dead for certain have left half written below `directory`; return the bytes freed."""
    freed = 0
    for path, nbytes in sizes(directory):
        name = os.path.basename(path)
        if name.startswith(_TEMPORARY):
            namespace, pid, start = [*name.removeprefix(_TEMPORARY).split("-"), "", "", ""][:3]
            if processes.is_dead(namespace, pid, start):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                    freed += nbytes
    return freed


def is_temporary(entry: str) -> bool:
    return entry.startswith(_TEMPORARY)


def remove_tree(path: str) -> int:
    """Delete a directory of ours with all that is in it; return the bytes freed, by us (others may help). Missing: 0.

    Links are deleted, not followed.
    """
    freed = 0
    # a writer that has not noticed yet may add a file while we delete: try again a few times
    for last in (False, False, False, False, True):
        try:
            for nbytes in _removed(path):
                freed += nbytes
        except FileNotFoundError:
            if not os.path.lexists(path):
                return freed
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or last:
                raise
        else:
            return freed
    return freed


def _removed(path: str) -> Iterator[int]:
    """Delete a tree, and tell the size of each file once it is gone."""

    def complain(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    if not stat.S_ISDIR(os.lstat(path).st_mode):  # somebody has planted it
        os.unlink(path)
        return
    for _, directories, entries, fd in os.fwalk(path, topdown=False, follow_symlinks=False, onerror=complain):
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(entry, dir_fd=fd, follow_symlinks=False)
                os.unlink(entry, dir_fd=fd)
                if stat.S_ISREG(found.st_mode):
                    yield found.st_size
        for entry in directories:
            try:
                os.rmdir(entry, dir_fd=fd)
            except FileNotFoundError:
                continue
            except NotADirectoryError:  # a link to a directory
                os.unlink(entry, dir_fd=fd)
    os.rmdir(path)
