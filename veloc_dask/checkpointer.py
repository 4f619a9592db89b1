"""The public face: `Checkpointer` saves, restores and protects what a Dask cluster holds, under one name.

Over 450 lines since each public method carries its documentation; what they do lies in `collections` and `restoring`.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import msgspec
from dask.utils import format_bytes, parse_bytes
from distributed import Client

from veloc_dask import collections, restoring
from veloc_dask.errors import CheckpointNotFound, ConfigError, VelocError
from veloc_dask.handle import SaveHandle
from veloc_dask.scheduler_plugin import VelocPlugin, messages
from veloc_dask.scheduler_plugin.messages import SaveRequest, SpaceConfig, Status, Version
from veloc_dask.storage import layout
from veloc_dask.storage.remote import check_url, sanitized
from veloc_dask.storage.tiers import TierConfig

INLINE_NBYTES = 1 << 20  # plain objects up to this size travel with the save itself


class _Raise:
    """The default of `restore`: there is none, raise."""

    def __repr__(self) -> str:
        return "<raise CheckpointNotFound>"


_RAISE: Any = _Raise()


class Tier(msgspec.Struct, frozen=True):
    """A node-local directory and how much of it may be used.

    Parameters
    ----------
    path
        A directory on each node; ``~`` and ``$VARIABLES`` are those of the workers.
    capacity
        Bytes, or a text such as ``"8 GiB"``; None takes what fits (in RAM: what the workers' memory limits leave).
    """

    path: str
    capacity: int | str | None = None

    def config(self) -> TierConfig:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ConfigError(f"tier {self.path!r}: expected the path of a directory")
        if self.capacity is None:
            return TierConfig(_absolute(os.fspath(self.path)))
        try:
            nbytes = parse_bytes(self.capacity)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"tier {self.path}: capacity {self.capacity!r}: expected bytes or a text such as '8 GiB'"
            ) from error
        if nbytes <= 0:
            raise ConfigError(f"tier {self.path}: capacity {self.capacity!r}: expected more than 0 bytes")
        return TierConfig(_absolute(os.fspath(self.path)), int(nbytes))


def _absolute(path: str) -> str:
    """A relative path means one seen from here; workers have other working directories."""
    plain = path and "://" not in path and not path.startswith(("~", "$", "memory:"))
    return os.path.abspath(path) if plain else path


class Checkpointer:
    """Saves, restores and protects Dask collections under one name.

    Parameters
    ----------
    client
        A connected `distributed.Client`, synchronous or not. With an asynchronous one, ``await`` the checkpointer and every
        method that talks to the cluster.
    name
        Names the series of versions: letters, digits, dots, dashes and underscores.
    local
        Node-local directories, the fastest first: paths or `Tier`.
    remote
        Where versions survive the cluster: a directory that all workers share, or an fsspec URL. None: local levels only.
    storage_options
        For fsspec. Sent to the workers, never stored or logged.
    keep
        How many versions are kept per level.
    allow_pickle
        Whether values that only pickle holds exactly may be saved, and be read again. Reading pickles from a store that
        others can write lets them run code.
    on_error
        "warn": a failed save is logged and shows on its handle. "raise": the next call of `save` or `close` raises it too.
    single_writer
        Promise that no two clusters save under one name at the same time, for stores on which creation is not exclusive.

    Raises
    ------
    ConfigError
        The configuration cannot work, on this client or on some worker.

    Examples
    --------
    >>> import dask.array as da, tempfile, veloc_dask as vd
    >>> from distributed import Client
    >>> client = Client(processes=False, dashboard_address=None)
    >>> where = tempfile.mkdtemp()
    >>> ck = vd.Checkpointer(client, "heat", local=where, remote=where + "/remote")
    >>> h = ck.save({"u": da.ones((4, 4), chunks=2), "step": 17})
    >>> h.wait("durable")
    >>> state = ck.restore()
    >>> state["step"], float(state["u"].sum().compute())
    (17, 16.0)
    >>> ck.close(); client.close()
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        local: str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier] = (),
        remote: str | os.PathLike[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        keep: int = 2,
        allow_pickle: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
        single_writer: bool = False,
    ) -> None:
        if not isinstance(client, Client):
            raise ConfigError(f"client: expected a distributed.Client, found {type(client).__name__}")
        if on_error not in ("warn", "raise"):
            raise ConfigError(f"on_error {on_error!r}: expected 'warn' or 'raise'")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep {keep!r}: expected an int of at least 1")
        self.client = client
        self.name = layout.check_name(name)
        self.remote = None if remote is None else _absolute(os.fspath(remote))
        if self.remote is not None:
            if not self.remote:
                raise ConfigError("remote '': expected a directory or a URL, or None")
            check_url(self.remote, single_writer=single_writer)
        tiers = [local] if isinstance(local, (str, os.PathLike, Tier)) else list(local)
        configs = tuple((t if isinstance(t, Tier) else Tier(t)).config() for t in tiers)  # type: ignore[arg-type]
        if not configs and self.remote is None:
            raise ConfigError("neither local= nor remote= is given: there is nowhere to save to")
        if len({c.path for c in configs}) != len(configs):
            raise ConfigError("local: the same directory is given twice")
        self.on_error = on_error
        self._config = SpaceConfig(
            self.name, configs, self.remote, dict(storage_options or {}), keep, bool(allow_pickle), bool(single_writer)
        )
        try:
            self._encoded = messages.encode(self._config)
        except (TypeError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"storage_options: expected plain values (str, int, float, bool, None, list, dict): {error}"
            ) from error
        self._handles: dict[str, SaveHandle] = {}  # saves that have not ended
        self._statuses: dict[str, Status] = {}  # of saves whose handle does not exist yet
        self._seen: dict[str, int] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._error: VelocError | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        if not client.asynchronous:
            client.sync(self._opened)

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def __await__(self) -> Any:
        async def opened() -> Checkpointer:
            await self._opened()
            return self

        return opened().__await__()

    def _sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.client.sync(function, *args, **kwargs)

    def _loop_call(self, function: Callable[[], Any]) -> None:
        loop: Any = self.client.loop
        loop.add_callback(function)

    async def _opened(self) -> None:
        """Open the name in the cluster, once."""
        if self._closed:
            raise VelocError(f"the checkpointer {self.name!r} is closed; make a new one")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        try:
            await asyncio.shield(self._opening)
        except VelocError:
            self._opening = None
            raise

    async def _open(self) -> None:
        await self.client.register_plugin(VelocPlugin())
        await self._ask("veloc_space", config=self._encoded)

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine on the client's loop, which keeps a reference until it is done."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, lease: str) -> None:
        try:
            await self._ask("veloc_release", name=self.name, lease=lease)
        except (OSError, VelocError):
            return  # the scheduler is gone, and the lease with it

    async def _ask(self, call: str, **arguments: Any) -> Any:
        """Call the plugin on the scheduler."""
        scheduler: Any = self.client.scheduler
        if scheduler is None:
            raise VelocError("the client is closed; connect a new one")
        return messages.result(await getattr(scheduler, call)(**arguments))

    def _failed(self, error: VelocError) -> None:
        if self.on_error == "raise":
            self._error = error

    def _raise_pending(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- save -------------------------------------------------------------------------------------------------------

    def save(self, value: Any, *, version: int | None = None) -> Any:
        """Save a value in the background; returns at once with a `SaveHandle`.

        Parameters
        ----------
        value
            Any nesting of dict, list and tuple of Dask arrays, dataframes, bags, delayed objects, futures and plain Python
            objects. Lazy collections are persisted, each block is captured as soon as it exists. Plain objects are taken
            now: later changes to them do no harm.
        version
            The version's number, above all others; None takes the next free one.

        Returns
        -------
        SaveHandle
            ``handle.value`` is `value` with its collections persisted: go on from there, and nothing is computed twice.

        Raises
        ------
        VersionExists
            The number is taken.
        NotSupported
            Something in `value` cannot be saved; the message says what and where.
        """
        if version is not None:
            layout.check_version(version)
        return self._sync(self._save, self._persist(value), version)

    async def _save(self, value: Any, version: int | None) -> SaveHandle:
        self._raise_pending()
        await self._opened()
        value = collections.persist(self.client, value)  # with an asynchronous client; else it is by now
        parts = collections.take_apart(value, allow_pickle=self._config.allow_pickle)
        plain = {}
        scattered = []  # kept until the scheduler knows of the save, which then wants them itself
        for number, block in parts.plain.items():
            if block.stored_nbytes <= INLINE_NBYTES:
                plain[number] = messages.encode(block)
            else:
                (future,) = await self.client.scatter([block], hash=False)
                parts.keys[number] = [future.key]
                scattered.append(future)
        request = SaveRequest(self.name, version, parts.structure, parts.items)
        reply = await self._ask("veloc_save", request=messages.encode(request), keys=parts.keys, plain=plain)
        del scattered
        handle = SaveHandle(self, reply["id"], reply["version"], value, process=reply["process"])
        self._handles[reply["id"]] = handle
        self._seen.setdefault(reply["id"], -1)
        known = self._statuses.pop(reply["id"], None)
        if known is not None:
            self._news(reply["id"], known)
        self._watch_soon()
        return handle

    def _persist(self, value: Any) -> Any:
        """Persist in the caller's thread if there is one: Dask computes some frames (``set_index``) to know their divisions."""
        return value if self.client.asynchronous else collections.persist(self.client, value)

    def _watch_soon(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        """Follow the saves that have not ended; one call to the scheduler waits for news of all of them."""
        while self._handles:
            try:
                news = await self._ask("veloc_watch", name=self.name, seen=self._seen, timeout_s=10.0)
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody follows the handles any more
                if self.client.status == "connecting":
                    await asyncio.sleep(0.5)
                    continue
                for handle in list(self._handles.values()):
                    handle._fail(
                        VelocError(
                            f"the connection to the scheduler was lost while version {handle.version} was saved: {error}"
                        )
                    )
                self._handles.clear()
                return
            self._read(news)

    def _read(self, news: dict[str, tuple[int, bytes]]) -> None:
        for save_id, (count, status) in news.items():
            decoded = messages.decode(status, Status)
            if decoded.done:
                self._seen.pop(save_id, None)  # the scheduler tells of ended saves only if it is asked for them
            else:
                self._seen[save_id] = count
            self._news(save_id, decoded)

    def _news(self, save_id: str, status: Status) -> None:
        handle = self._handles.get(save_id)
        if handle is None:
            self._statuses[save_id] = status
            while len(self._statuses) > 256:
                self._statuses.pop(next(iter(self._statuses)))
            return
        if status.done:
            del self._handles[save_id]
        handle._update(status)

    # -- restore ----------------------------------------------------------------------------------------------------

    def restore(
        self,
        version: int | None = None,
        *,
        select: Sequence[str] | None = None,
        persist: bool = False,
        default: Any = _RAISE,
        wait_for: int = 0,
        timeout: float = 60.0,
    ) -> Any:
        """The saved value of a version: the same structure, types and chunks, lazily.

        Each block is one load task that reads and verifies the nearest copy; blocks are read where a copy lies. Futures are
        futures again, and plain objects are themselves.

        Parameters
        ----------
        version
            None takes the newest complete version; newer incomplete ones are reported with a warning.
        select
            Keys of the saved dict to restore; the others are left alone.
        persist
            Load everything now, as ``client.persist`` would.
        default
            Returned if there is no such version, instead of CheckpointNotFound.
        wait_for
            Wait until this many nodes have joined, at most `timeout` seconds.

        Raises
        ------
        CheckpointNotFound
            No complete version of that number (or at all), and no `default` is given.
        IntegrityError
            What was found is damaged; nothing of it is used.
        """
        if version is not None:
            layout.check_version(version)
        return self._sync(self._restore, version, select, persist, default, wait_for, timeout)

    async def _restore(
        self,
        version: int | None,
        select: Sequence[str] | None,
        persist: bool,
        default: Any,
        wait_for: int,
        timeout: float,
    ) -> Any:
        await self._opened()
        try:
            found = await self._ask(
                "veloc_restore",
                name=self.name,
                version=version,
                client=self.client.id,
                wait_for=wait_for,
                timeout_s=timeout,
            )
        except CheckpointNotFound:
            if default is _RAISE:
                raise
            return default
        for note in found["notes"]:
            warnings.warn(note, RuntimeWarning, stacklevel=2)
        try:
            value = await restoring.rebuild(self, found, select)
        except BaseException:
            await self._release(found["lease"])
            raise
        return collections.persist(self.client, value) if persist else value

    # -- protect ----------------------------------------------------------------------------------------------------

    def protect(self, value: Any) -> Any:
        """Keep persisted keys recoverable from now on, without a version.

        Lazy collections are persisted. The snapshots lie on node-local tiers and go when the keys are forgotten.

        Returns
        -------
        The value with its collections persisted; go on from it.
        """
        return self._sync(self._protect, self._persist(value))

    async def _protect(self, value: Any) -> Any:
        await self._opened()
        if not self._config.local:
            raise ConfigError("protect needs a node-local tier; pass local=")
        value = collections.persist(self.client, value)
        keys = [k for leaf in collections.leaves(value) for k in collections.keys_of(leaf) or ()]
        await self._ask("veloc_protect", name=self.name, keys=keys)
        return value

    def unprotect(self, value: Any) -> Any:
        """Drop the snapshots that `protect` made for the keys of a value."""
        return self._sync(self._unprotect, value)

    async def _unprotect(self, value: Any) -> None:
        await self._opened()
        keys = [k for leaf in collections.leaves(value) for k in collections.keys_of(leaf) or ()]
        await self._ask("veloc_unprotect", name=self.name, keys=keys)

    def protected(self) -> Any:
        """The protected keys, each with whether its snapshot exists yet.

        Returns
        -------
        dict
            key -> bool
        """
        return self._sync(self._protected)

    async def _protected(self) -> dict[Any, bool]:
        await self._opened()
        return {key: bool(there) for key, there in await self._ask("veloc_protected", name=self.name)}

    # -- versions ---------------------------------------------------------------------------------------------------

    def versions(self) -> Any:
        """The versions there are, oldest first: number, level ("durable", "local" or "incomplete"), blocks, bytes, when.

        Returns
        -------
        list of Version
        """
        return self._sync(self._versions)

    async def _versions(self) -> list[Version]:
        await self._opened()
        return [messages.decode(v, Version) for v in await self._ask("veloc_versions", name=self.name)]

    def latest(self) -> Any:
        """The number of the newest complete version, None if there is none."""
        return self._sync(self._latest)

    async def _latest(self) -> int | None:
        return max((v.version for v in await self._versions() if v.level != "incomplete"), default=None)

    def verify(self, version: int | None = None) -> Any:
        """Read and check every block of a version (None: the newest complete one).

        Returns
        -------
        dict
            ``version``, ``level``, ``nblocks``, ``nbytes`` (as stored), and ``problems``: a list of texts, empty if all is well.
        """
        if version is not None:
            layout.check_version(version)
        return self._sync(self._verify, version)

    async def _verify(self, version: int | None) -> dict[str, Any]:
        await self._opened()
        found: dict[str, Any] = await self._ask("veloc_verify", name=self.name, version=version)
        return {**found, "problems": list(found["problems"])}

    def delete(self, version: int) -> Any:
        """Delete a version. It is out of the listings at once; blocks that back live keys stay until those are forgotten."""
        layout.check_version(version)
        return self._sync(self._delete, version)

    async def _delete(self, version: int) -> None:
        await self._opened()
        await self._ask("veloc_delete", name=self.name, version=version)

    def prune(self) -> Any:
        """Delete versions beyond ``keep``, as happens after each save.

        A cluster that has saved under the name also collects what dead attempts left. One that has not does not touch them:
        they may belong to a cluster that is running.
        """
        return self._sync(self._prune)

    async def _prune(self) -> None:
        await self._opened()
        await self._ask("veloc_prune", name=self.name)

    def due(self) -> bool:
        """Whether it is time to save. False: this release has no interval policy, save when it suits your program."""
        return False

    def close(self, timeout: float = 60.0) -> Any:
        """Wait for the saves under way, at most `timeout` seconds, and close.

        What is left then goes on in the cluster; a warning says what it is.
        """
        return self._sync(self._close, timeout)

    async def _close(self, timeout: float) -> None:
        if self._closed:
            return
        left: list[bytes] = []
        if self._opening is not None and self.client.status == "running":
            left = await self._ask("veloc_drain", name=self.name, timeout_s=timeout)
            # what has ended while we waited shows on its handle; the others are still followed
            self._read(await self._ask("veloc_watch", name=self.name, seen=self._seen, timeout_s=0.0))
        self._closed = True
        for status in (messages.decode(s, Status) for s in left):
            warnings.warn(
                f"version {status.version} of {self.name!r} is {status.level} after {timeout:g} s: "
                f"{status.captured} of {status.nblocks} blocks captured, {status.flushed} flushed; it goes on in the cluster",
                RuntimeWarning,
                stacklevel=2,
            )
        self._raise_pending()

    def __repr__(self) -> str:
        tiers = ", ".join(
            f"{c.path}" + (f" ({format_bytes(c.capacity_nbytes)})" if c.capacity_nbytes else "")
            for c in self._config.local
        )
        remote = "none" if self.remote is None else sanitized(self.remote)
        return f"<Checkpointer {self.name!r}: local {tiers or 'none'}, remote {remote}, keep {self._config.keep}>"
