"""One checkpoint name on the scheduler: its workers and nodes, its saves under way, its versions and what must stay.

Knows which worker has opened the name's tiers (and so may be given work), sends orders to workers in batches, and takes their
reports. Asks a worker for everything that touches storage. What a save needs next is decided in `saves`.

Over 450 lines, because orders, reports, protection and retention all change the same tables and are read together.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from veloc_dask.scheduler_plugin import internals, messages, nodes
from veloc_dask.scheduler_plugin.internals import Key
from veloc_dask.scheduler_plugin.messages import SaveRequest, SpaceConfig
from veloc_dask.scheduler_plugin.nodes import Nodes
from veloc_dask.scheduler_plugin.saves import ORDER_BATCH, BlockState, ProtectDriver, Save, SaveDriver, lost_blocks
from veloc_dask.storage import layout, table
from veloc_dask.storage.blocks import ItemSpec
from veloc_dask.storage.errors import BlockLost, TierError, VelocError, VersionExists
from veloc_dask.storage.root import Item

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from veloc_dask.scheduler_plugin.scheduler import VelocPlugin

logger = logging.getLogger("veloc_dask")

UNKNOWN_KEY_S = 60.0  # a graph that was submitted just before the save may still be on its way
WATCH_S = 0.02
PROTECT_BATCH = 4096
MISSING_S = 0.1
MISSES = 50  # tries to find a block that moves from worker to worker
SLICE = 2000  # blocks handled before the event loop gets its turn


class Lease:
    """A restored version whose blocks a lazy graph of this cluster may still read."""

    def __init__(self, directory: str, client: str, prefix: str) -> None:
        self.directory = directory
        self.client = client
        self.prefix = prefix  # of the names of its load tasks
        self.released = False  # the client has dropped the graph; tasks may still need the blocks


class Space:
    """See the module. All methods run on the scheduler's event loop."""

    def __init__(self, plugin: VelocPlugin, config: SpaceConfig) -> None:
        self.plugin = plugin
        self.scheduler: Scheduler = plugin.scheduler
        self.config = config
        self.name = config.name
        self.run_uuid = plugin.run_uuid
        self.run: int | None = None
        self.nodes = Nodes(plugin.scheduler, config, plugin.run_uuid)
        self.drivers: dict[str, SaveDriver] = {}  # by attempt; those that ended too, for their status
        self.taken: set[int] = set()  # versions that exist or are under way
        self.seen: set[int] = set()  # versions of which at least a part was found
        self.leases: dict[str, Lease] = {}
        self.protected: dict[Key, tuple[ProtectDriver, int]] = {}  # key -> its block
        self._protection: ProtectDriver | None = None  # the batch that new keys go to
        self._nprotected = 0
        self._aborted: deque[dict[str, Any]] = deque(maxlen=64)  # the last attempts that were given up
        self._run_lock = asyncio.Lock()
        self._changed = asyncio.Event()

    # -- workers and nodes ------------------------------------------------------------------------------------------

    async def open_on(self, address: str, *, joining: bool = False) -> None:
        """Have a worker open the tiers, and give it what waits for its node."""
        node = await self.nodes.open_on(address, joining=joining)
        if node is None:
            self.dispatch()  # what only this worker holds cannot be captured
        else:
            for what in self._aborted:  # it may have been away when others cleaned up
                self._send(address, "veloc-abort", **{**what, "remote": False})
            self.reflush(node)
            self.dispatch()

    def worker_left(self, address: str) -> None:
        """Give its open orders to others; blocks that only its node holds wait for the node to come back."""
        node = self.nodes.left(address)
        if node is None:
            return
        for driver in self.active():
            save = driver.save
            for number, worker in enumerate(save.workers):
                if worker == address and save.states[number] == BlockState.ORDERED:
                    self.want_again(driver, number)
        self.reflush(node)
        self.dispatch()
        if node not in self.nodes.of.values():
            asyncio.get_running_loop().call_later(nodes.NODE_GRACE_S, self._node_lost, node)

    def reflush(self, node: str) -> None:
        """Have the blocks that lie on a node, and that nobody flushes, flushed by one of its workers."""
        if self.config.remote is None:
            return
        addresses = [a for a, n in self.nodes.of.items() if n == node]
        if not addresses:
            return
        for driver in self.active():
            if not driver.flushes:
                continue
            save = driver.save
            numbers = [
                n
                for n, state in enumerate(save.states)
                if state == BlockState.CAPTURED and save.nodes[n] == node and save.workers[n] not in self.nodes.of
            ]
            for start in range(0, len(numbers), ORDER_BATCH):
                address = addresses[(start // ORDER_BATCH) % len(addresses)]
                part = numbers[start : start + ORDER_BATCH]
                for number in part:
                    save.workers[number] = address
                self._send(
                    address,
                    "veloc-flush",
                    save=save.attempt,
                    directory=save.directory,
                    blocks=[(n, save.rows[n]) for n in part],
                )

    def _node_lost(self, node: str) -> None:
        if node in self.nodes.of.values():
            return
        for driver in self.active():
            save = driver.save
            numbers = [n for n, s in enumerate(save.states) if s == BlockState.CAPTURED and save.nodes[n] == node]
            hopeless = []
            for number in numbers:
                key = save.keys[number]
                if key is None and isinstance(driver, ProtectDriver):
                    continue
                self.plugin.recovery.drop(key, save.directory)
                save.set_lost(number, table.decode_row(save.rows[number]).stored_nbytes)
                if key is not None and key in self.scheduler.tasks:
                    self.want_again(driver, number)
                else:
                    hopeless.append(number)
            if hopeless:
                driver.fail(lost_blocks(save, hopeless))
            elif numbers:
                logger.warning(
                    "node %s was lost: %d blocks of %s are captured again", node, len(numbers), save.directory
                )
        self.dispatch()

    def _send(self, address: str, op: str, **message: Any) -> None:
        self.scheduler.worker_send(address, {"op": op, "name": self.name, **message})

    # -- saving -----------------------------------------------------------------------------------------------------

    def choose_version(self, version: int | None) -> int:
        """The next free number, or the given one if it is free."""
        newest = max(self.taken, default=0)
        if version is None:
            newest = max(newest, *self.seen, 0)
            if newest >= layout.MAX_VERSION:
                raise VersionExists(f"{self.name!r}: version numbers are used up at {newest}; save under another name")
            return newest + 1
        if version in self.taken:
            raise VersionExists(
                f"{self.name!r} version {version} exists already; give a number above {newest}, or none"
            )
        if version < newest and self.taken:
            raise VersionExists(
                f"{self.name!r} version {version} is below the newest one, {newest}; version numbers only grow"
            )
        return version

    async def start_save(self, request: SaveRequest, keys: list[list[Key]], plain: dict[int, bytes]) -> Save:
        """Take a save over from a client: from here on it belongs to the scheduler and the workers."""
        version = self.choose_version(request.version)
        self.taken.add(version)
        save = Save(self, version, request.structure, request.items)
        driver = SaveDriver(save)
        self.drivers[save.attempt] = driver
        for item, item_keys in enumerate(keys):
            for handled, number in enumerate(save.add_blocks(item, item_keys)):
                if item in plain:
                    save.plain[number] = plain[item]
                    save.keys[number] = None
                if handled % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
        await self._want_all(driver, range(len(save.keys)))
        driver.start()
        self.dispatch()
        return save

    async def _want_all(self, driver: SaveDriver, numbers: range) -> None:
        save = driver.save
        unknown: list[Key] = []
        for start in range(numbers.start, numbers.stop, SLICE):
            part = range(start, min(start + SLICE, numbers.stop))
            keys = [save.keys[n] for n in part if save.keys[n] is not None]
            if driver.pins:
                # the save goes on when the client leaves or drops its futures: the save itself wants the keys
                internals.keep_keys(self.scheduler, keys, save.client)
            for number in part:
                if save.keys[number] is not None:
                    self.plugin.want(save.keys[number], driver, number)
            unknown += [k for k in keys if k not in self.scheduler.tasks]
            if part.stop < numbers.stop:
                await asyncio.sleep(0)
        if unknown:
            self.plugin.unknown.update(unknown)
            asyncio.get_running_loop().call_later(UNKNOWN_KEY_S, self._check_unknown, driver, unknown)

    def _check_unknown(self, driver: SaveDriver, keys: list[Key]) -> None:
        missing = [k for k in keys if k in self.plugin.unknown and k not in self.scheduler.tasks]
        self.plugin.unknown.difference_update(missing)
        if missing and not driver.save.done:
            driver.fail(
                BlockLost(
                    f"{self.name!r} version {driver.save.version}: key {missing[0]!r} is not known to the scheduler; "
                    "its future was released or cancelled before it was saved"
                )
            )

    def want_again(self, driver: SaveDriver, number: int) -> None:
        """A block that was ordered, or captured on a node that is lost, must be captured once more."""
        save = driver.save
        save.states[number] = BlockState.WANTED
        save.workers[number] = ""
        key = save.keys[number]
        if key is None:
            return  # a plain object: its bytes are still here
        if key not in self.scheduler.tasks:
            driver.fail(
                BlockLost(f"{save.describe(number)}: {key!r} was cancelled or lost before it was captured; save again")
            )
            return
        self.plugin.want(key, driver, number)
        if driver.pins:
            internals.keep_keys(self.scheduler, [key], save.client)
            # a key that Dask only remembers as lineage is computed again if nobody but us asks for it
            self.scheduler.loop.add_callback(internals.compute_if_wanted, self.scheduler, key)

    def active(self) -> list[SaveDriver]:
        return [d for d in self.drivers.values() if not d.save.done]

    def dispatch(self) -> None:
        """Order the capture of every wanted block whose value is in memory somewhere."""
        self.plugin.dispatch_soon(everything=True)
        for driver in self.active():
            if driver.save.plain:
                self._order_plain(driver)

    def _order_plain(self, driver: SaveDriver) -> None:
        save = driver.save
        for number, data in list(save.plain.items()):
            if save.states[number] != BlockState.WANTED:
                continue
            addresses = self.nodes.workers_of("")
            if not addresses:
                return
            self._assign(save, number, addresses[0])
            self._send_order(driver, addresses[0], plain=[(number, save.item_of[number], data)])

    def _send_order(
        self,
        driver: SaveDriver,
        address: str,
        *,
        blocks: Sequence[tuple[int, Key, int, tuple[int, ...]]] = (),
        plain: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        save = driver.save
        items = {b[2] for b in blocks} | {p[1] for p in plain}
        self._send(
            address,
            "veloc-capture",
            save=save.attempt,
            directory=save.directory,
            specs=[(i, messages.encode(save.items[i].spec)) for i in items],
            blocks=list(blocks),
            plain=list(plain),
            flush=driver.flushes and self.config.remote is not None,
        )

    def _assign(self, save: Save, number: int, address: str) -> None:
        save.states[number] = BlockState.ORDERED
        save.workers[number] = address
        self.nodes.outstanding[address] += 1

    def order(self, wanted: Iterable[tuple[SaveDriver, int]]) -> list[tuple[SaveDriver, int]]:
        """Send capture orders for blocks in memory; returns those for which no worker is ready yet."""
        batches: dict[tuple[str, str], list[tuple[int, Key, int, tuple[int, ...]]]] = defaultdict(list)
        drivers = {}
        left = []
        for driver, number in wanted:
            save = driver.save
            if save.done or save.states[number] != BlockState.WANTED:
                continue
            key = save.keys[number]
            ts = self.scheduler.tasks.get(key)
            if ts is None or not ts.who_has:
                left.append((driver, number))
                continue
            if ts.actor:
                driver.fail(
                    VelocError(
                        f"{save.describe(number)}: is an actor; actors live in one worker's memory and are not saved"
                    )
                )
                continue
            addresses = [w.address for w in ts.who_has if w.address in self.nodes.of]
            if not addresses:
                refused = [error for w in ts.who_has if (error := self.nodes.open_errors.get(w.address)) is not None]
                if len(refused) == len(ts.who_has):
                    driver.fail(
                        TierError(f"{save.describe(number)}: only a worker without usable tiers holds it: {refused[0]}")
                    )
                else:
                    left.append((driver, number))
                continue
            address = min(addresses, key=lambda a: self.nodes.outstanding[a])
            self._assign(save, number, address)
            batches[address, save.attempt].append((number, key, save.item_of[number], save.index_of[number]))
            drivers[save.attempt] = driver
        for (address, attempt), blocks in batches.items():
            for start in range(0, len(blocks), ORDER_BATCH):
                self._send_order(drivers[attempt], address, blocks=blocks[start : start + ORDER_BATCH])
        return left

    # -- protection without a version -------------------------------------------------------------------------------

    async def protect(self, keys: list[Key]) -> None:
        """Keep these keys recoverable from now on, until they are forgotten or unprotected."""
        new = [k for k in dict.fromkeys(keys) if k not in self.protected]
        driver = self._protection
        if driver is None or len(driver.save.keys) >= PROTECT_BATCH:
            # keys come and go for as long as the cluster lives: what belongs to a batch of them goes with the last one
            driver = self._protection = ProtectDriver(Save(self, 0, None, []))
            driver.save.directory = layout.protected_name(self.run_uuid)
            self.drivers[driver.save.attempt] = driver
        save = driver.save
        first = len(save.keys)
        for key in new:
            self._nprotected += 1
            save.items.append(Item("object", ItemSpec(layout.key_path(key, self._nprotected), "blocks", ())))
            (number,) = save.add_blocks(len(save.items) - 1, [key])
            self.protected[key] = (driver, number)
            self.plugin.protectors.setdefault(key, []).append(self)
        await self._want_all(driver, range(first, len(save.keys)))
        self.dispatch()

    def unprotect(self, key: Key) -> None:
        """Drop a key's own snapshot (those in versions stay)."""
        if key not in self.protected:
            return
        driver, number = self.protected.pop(key)
        save = driver.save
        self.plugin.unwant(key, driver, number)
        self.plugin.recovery.drop(key, save.directory)
        if save.states[number] >= BlockState.CAPTURED:
            for address in self.nodes.workers_of(save.nodes[number])[:1]:
                self._send(address, "veloc-forget", directory=save.directory, rows=[save.rows[number]])
        if save.states[number] != BlockState.ORDERED:
            save.states[number] = BlockState.FLUSHED  # nothing is to be done about it any more
        save.keys[number] = None
        save.rows[number] = b""
        self._drop_batch(driver)

    def _drop_batch(self, driver: ProtectDriver) -> None:
        """Forget a full batch of protected keys when none of it is left."""
        save = driver.save
        live = BlockState.ORDERED in save.states or any(k is not None for k in save.keys)
        if driver is not self._protection and not live:
            self.drivers.pop(save.attempt, None)

    def is_protected(self) -> list[tuple[Key, bool]]:
        """Each protected key, and whether it has its snapshot already."""
        return [(k, d.save.states[n] >= BlockState.CAPTURED) for k, (d, n) in self.protected.items()]

    # -- reports of the workers -------------------------------------------------------------------------------------

    def on_captured(
        self,
        worker: str,
        save: str,
        blocks: Collection[tuple[int, bytes, str, int]],
        failed: Collection[tuple[int, tuple[str, str]]],
        missing: Collection[int],
    ) -> None:
        driver = self.drivers.get(save)
        if driver is None or driver.save.done:
            return
        reported = len(blocks) + len(failed) + len(missing)
        self.nodes.outstanding[worker] = max(0, self.nodes.outstanding[worker] - reported)
        state = driver.save
        released = []
        for number, row, node, nbytes in blocks:
            if isinstance(driver, ProtectDriver) and state.keys[number] is None:  # unprotected while it was captured
                self._send(worker, "veloc-forget", directory=state.directory, rows=[row])
                state.states[number] = BlockState.FLUSHED
                self._drop_batch(driver)
                continue
            if not state.set_captured(number, row, node, nbytes):
                continue
            state.workers[number] = worker
            key = state.keys[number]
            if key is not None:
                self.plugin.unwant(key, driver, number)
                if key in self.scheduler.tasks:
                    self.plugin.recovery.add(key, state.ref(number))
                released.append(key)
        if released and state.client in self.scheduler.clients:
            self.scheduler.client_releases_keys([k for k in released if k in self.scheduler.tasks], state.client)
        for number in missing:  # the value has moved on since the order; where to, the scheduler knows in a moment
            asyncio.get_running_loop().call_later(MISSING_S, self._missed, driver, number)
        for number, (kind, text) in failed:
            error = messages.rebuild_error((kind, f"{state.describe(number)}: {text}"))
            driver.fail(error)
        driver.progressed()

    def _missed(self, driver: SaveDriver, number: int) -> None:
        """A worker did not have the block that it was to capture: try again, but not for ever."""
        save = driver.save
        if save.done or save.states[number] != BlockState.ORDERED:
            return
        save.misses[number] = save.misses.get(number, 0) + 1
        if save.misses[number] > MISSES:
            driver.fail(
                BlockLost(f"{save.describe(number)}: workers that should hold it could not read it, {MISSES} times")
            )
        else:
            self.want_again(driver, number)

    def on_flushed(
        self,
        worker: str,
        save: str,
        blocks: Collection[tuple[int, int]],
        failed: Collection[tuple[int, tuple[str, str]]],
    ) -> None:
        driver = self.drivers.get(save)
        if driver is None or driver.save.done:
            return
        state = driver.save
        for number, nbytes in blocks:
            if state.set_flushed(number, nbytes):
                key = state.keys[number]
                if key is not None and key in self.plugin.recovery.snapshots:
                    self.plugin.recovery.add(key, state.ref(number))
        for number, (kind, text) in failed:
            driver.flush_failed(messages.rebuild_error((kind, f"{state.describe(number)}: {text}")))
        driver.progressed()

    # -- what a driver needs ----------------------------------------------------------------------------------------

    async def acquire_run(self) -> int:
        """This cluster's run number under the name, taken at the first commit."""
        async with self._run_lock:
            if self.run is None:
                self.run = await self.nodes.call("", "take_run")
            return self.run

    def ended(self, save: Save) -> None:
        for number, worker in enumerate(save.workers):
            if save.states[number] == BlockState.ORDERED and worker in self.nodes.outstanding:
                self.nodes.outstanding[worker] = max(0, self.nodes.outstanding[worker] - 1)
        for number, key in enumerate(save.keys):
            if key is not None and save.states[number] != BlockState.FLUSHED:
                self.plugin.unwant(key, self.drivers[save.attempt], number)
        save.end()
        ended = [d for d in self.drivers.values() if d.save.done]
        pinned = self.pinned()
        for driver in ended[:-64]:  # statuses of the last ones are kept for handles that still ask
            if driver.save.directory not in pinned:
                del self.drivers[driver.save.attempt]

    def burn(self, version: int) -> None:
        """Somebody else has this number."""
        self.taken.add(version)

    def abort(self, save: Save, *, local: bool, remote: bool) -> None:
        """Have the workers stop with an attempt, and remove what it left on the nodes and on the remote tier."""
        if local:
            for key in save.keys:
                if key is not None:
                    self.plugin.recovery.drop(key, save.directory)
            if not isinstance(save.error, VersionExists):
                self.taken.discard(save.version)
        what = {"directory": save.directory, "local": local, "remote": remote and self.config.remote is not None}
        self._aborted.append(what)
        for address in list(self.nodes.of):
            self._send(address, "veloc-abort", **what)

    def lease(self, directory: str, client: str) -> str:
        """Keep a version that a client restores until nothing of its lazy graph is left; the lease's id."""
        lease_id = uuid.uuid4().hex
        self.leases[lease_id] = Lease(directory, client, f"veloc-load-{lease_id}")
        return lease_id

    def pinned(self) -> set[str]:
        """Directories whose blocks must stay although retention would delete them."""
        recovery = self.plugin.recovery
        pinned = {
            d.save.directory
            for d in self.drivers.values()
            if recovery.backed((k for k in d.save.keys if k is not None), d.save.directory)
        }
        for lease_id, lease in list(self.leases.items()):
            if lease.released and not internals.group_exists(self.scheduler, lease.prefix):
                del self.leases[lease_id]
            else:
                pinned.add(lease.directory)
        return pinned

    async def retain(self, *, remote: bool) -> None:
        """A round of retention on the nodes or on the remote tier."""
        active = [d.save.directory for d in self.active() if not d.save.settled]
        active.append(layout.protected_name(self.run_uuid))
        arguments: dict[str, Any] = {
            "remote": remote,
            "run": self.run,
            "pinned": sorted(self.pinned()),
            "active": active,
        }
        try:
            if remote:
                removed = [await self.nodes.call("", "retain", **arguments)]
            else:
                removed = await self.nodes.call_all("retain", **arguments)
        except VelocError as error:
            logger.warning("old versions of %s could not be removed from the remote tier: %s", self.name, error)
            return
        for reply in removed:
            self._forget(reply["directories"])

    def _forget(self, directories: Collection[str]) -> None:
        for driver in self.drivers.values():
            if driver.save.directory in directories:
                for key in driver.save.keys:
                    if key is not None:
                        self.plugin.recovery.drop(key, driver.save.directory)
                if driver.save.done:
                    driver.save.keys = []

    # -- who waits for changes --------------------------------------------------------------------------------------

    def changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self, seen: dict[str, int], timeout_s: float) -> dict[str, tuple[int, bytes]]:
        """Statuses of saves that have changed since the counts in `seen`; waits until one has, or the time is over.

        Saves that are not in `seen` are new to the caller, unless they have ended.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            changed = self._changed
            news = {
                attempt: (driver.save.seen, messages.encode(driver.save.status()))
                for attempt, driver in self.drivers.items()
                if driver.pins
                and driver.save.seen > seen.get(attempt, -1)
                and (attempt in seen or not driver.save.done)
            }
            if news or loop.time() >= deadline:
                return news
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
                    await asyncio.sleep(WATCH_S)  # changes of a moment travel together
            except TimeoutError:
                continue
