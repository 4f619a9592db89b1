"""Remote tiers that misbehave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from veloc_dask.storage.remote import Remote


class WrappedRemote:
    """Passes everything on; a base to override one thing."""

    def __init__(self, inner: Remote) -> None:
        self.inner = inner
        self.label = inner.label

    def put(self, path: str, buffers: Iterable[Any]) -> int:
        return self.inner.put(path, buffers)

    def put_many(self, objects: Sequence[tuple[str, Iterable[Any]]]) -> list[int]:
        return self.inner.put_many(objects)

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        return self.inner.create(path, data, within=within)

    def get(
        self, path: str, *, offset: int = 0, length: int | None = None, limit: int | None = None
    ) -> npt.NDArray[np.uint8]:
        return self.inner.get(path, offset=offset, length=length, limit=limit)

    def size(self, path: str) -> int | None:
        return self.inner.size(path)

    def names(self, path: str) -> list[str]:
        return self.inner.names(path)

    def remove(self, path: str) -> None:
        self.inner.remove(path)

    def remove_tree(self, path: str) -> None:
        self.inner.remove_tree(path)

    def sweep(self, path: str) -> None:
        self.inner.sweep(path)


class LostReply(WrappedRemote):
    """The first `times` creations do what they should, and then report a failure."""

    def __init__(self, inner: Remote, times: int = 1) -> None:
        super().__init__(inner)
        self.left = times

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        created = super().create(path, data, within=within)
        if self.left:
            self.left -= 1
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
        return created


class NoDirectories(WrappedRemote):
    """An object store: no directory is ever missing, and a tree is deleted object by object, under its name."""

    def create(self, path: str, data: bytes, *, within: str = "") -> bool:
        return self.inner.create(path, data)
