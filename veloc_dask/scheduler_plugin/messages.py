"""What crosses processes between client, scheduler and workers, as frozen structs encoded to bytes.

Dask keys and row bytes travel beside them as plain message fields. ``storage_options`` may hold credentials: they are in
`SpaceConfig` only, which is sent where it is needed and never pickled with a plugin, logged or stored.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from veloc_dask.storage import errors
from veloc_dask.storage.errors import VelocError
from veloc_dask.storage.root import Item
from veloc_dask.storage.tiers import TierConfig

T = TypeVar("T", bound=msgspec.Struct)


class SpaceConfig(msgspec.Struct, frozen=True):
    """Where the versions of one checkpoint name live, and how they are written."""

    name: str
    local: tuple[TierConfig, ...]
    remote: str | None
    storage_options: dict[str, Any] = {}
    keep: int = 2
    allow_pickle: bool = True
    single_writer: bool = False

    def __repr__(self) -> str:  # credentials stay out of logs
        return f"SpaceConfig({self.name!r})"


class SaveRequest(msgspec.Struct, frozen=True):
    """What a client asks the scheduler to save. The keys of the blocks travel beside it, item by item."""

    name: str
    version: int | None
    structure: Any
    items: list[Item]


class Status(msgspec.Struct, frozen=True):
    """How far a save has come."""

    id: str
    version: int
    level: str  # "pending", "local", "protected", "durable"
    done: bool  # nothing more will happen
    error: tuple[str, str] | None = None  # class name in the error tree, message
    nblocks: int = 0
    captured: int = 0
    flushed: int = 0
    nbytes: int = 0  # of the blocks captured so far, as stored
    flushed_nbytes: int = 0


class Version(msgspec.Struct, frozen=True):
    """One version as the user sees it."""

    version: int
    level: str  # "durable", "local", or "incomplete"
    nblocks: int
    nbytes: int
    created: str
    directory: str
    problem: str = ""  # of an incomplete one


class LocalPart(msgspec.Struct, frozen=True):
    """What one node holds of a version."""

    directory: str
    version: int
    run: int
    nblocks: int
    nbytes: int
    created: str
    segments: tuple[str, ...]  # that the root lists
    present: tuple[str, ...]  # of these, the valid ones on this node
    missing: tuple[str, ...]  # blocks that its segments list and that no tier of it (nor the remote one) has
    nmissing: int = 0


class RemotePart(msgspec.Struct, frozen=True):
    """A version on the remote tier."""

    directory: str
    version: int
    nblocks: int
    nbytes: int
    created: str


class RemoteList(msgspec.Struct, frozen=True):
    versions: tuple[RemotePart, ...]
    taken: tuple[int, ...]  # numbers in use, tombstones included
    problems: tuple[str, ...]


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)


def answering(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[dict[str, Any]]]:
    """A call's handler whose errors of ours are part of the answer: raised, Dask would log each with its traceback."""

    @functools.wraps(handler)
    async def wrapper(**arguments: Any) -> dict[str, Any]:
        try:
            return {"result": await handler(**arguments)}
        except VelocError as error:
            return {"error": describe_error(error)}

    return wrapper


def result(answer: dict[str, Any]) -> Any:
    """What a call returned; raises the error that it answered with."""
    if "error" in answer:
        raise rebuild_error(answer["error"])
    return answer["result"]


def describe_error(error: BaseException) -> tuple[str, str]:
    """An error as text that can be raised again in another process."""
    if isinstance(error, VelocError):
        return type(error).__name__, str(error)
    return "VelocError", f"{type(error).__name__}: {error}"


def rebuild_error(described: Sequence[str]) -> VelocError:
    kind, text = described
    found = getattr(errors, kind, VelocError)
    if not (isinstance(found, type) and issubclass(found, VelocError)):
        found = VelocError
    return found(text)
