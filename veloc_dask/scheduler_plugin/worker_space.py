"""One checkpoint name on one worker: its tiers, and what the scheduler asks of them.

Every public method is a call that the scheduler may make by its name (see `CALLS`), runs in a thread, and does storage I/O:
writing the table and roots, committing, listing, reading and deleting. Arguments and results are plain message values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from veloc_dask.scheduler_plugin import messages
from veloc_dask.scheduler_plugin.messages import LocalPart, RemoteList, RemotePart, SpaceConfig
from veloc_dask.storage import commit, files, layout, reader, retention, table
from veloc_dask.storage import root as roots
from veloc_dask.storage.errors import BlockLost, IntegrityError, TierError, VersionExists
from veloc_dask.storage.reader import BlockRef, Bytes, Copy
from veloc_dask.storage.remote import Remote, open_remote, retried
from veloc_dask.storage.tiers import Node, block_path, open_node
from veloc_dask.storage.writer import Writer

logger = logging.getLogger("veloc_dask")

ROOT = "root.json"
CALLS = frozenset(
    {
        "write_segment",
        "write_root",
        "take_run",
        "commit",
        "check_place",
        "retain",
        "delete",
        "list_remote",
        "list_local",
        "read_version",
        "read_block",
        "verify",
    }
)


class WorkerSpace:
    """See the module. `node` may have no tiers; `remote` is None where only node-local levels are wanted."""

    def __init__(self, config: SpaceConfig, run_uuid: str, node: Node, remote: Remote | None) -> None:
        self.config = config
        self.name = config.name
        self.run_uuid = run_uuid
        self.node = node
        self._remote = remote
        self.writer = Writer(config.name, node, remote)
        self._owned: set[str] = set()

    @classmethod
    def open(
        cls,
        config: SpaceConfig,
        run_uuid: str,
        *,
        ram_budget_nbytes: int,
        ram_budget_reason: str,
        forbidden: Sequence[str],
    ) -> WorkerSpace:
        node = open_node(
            config.local,
            ram_budget_nbytes=ram_budget_nbytes,
            ram_budget_reason=ram_budget_reason,
            forbidden=forbidden,
        )
        try:
            remote = open_remote(config.remote, config.storage_options) if config.remote is not None else None
        except BaseException:
            node.close()
            raise
        return cls(config, run_uuid, node, remote)

    def close(self) -> None:
        self.node.close()

    @property
    def remote(self) -> Remote:
        assert self._remote is not None, "only called where a remote tier is configured"
        return self._remote

    def own(self, directory: str) -> None:
        """Note in a directory that this process writes to it, once."""
        if directory not in self._owned and self.node.tiers:
            self._owned.add(directory)
            try:
                retention.own(self.node, self.name, directory, self.run_uuid)
            except TierError as error:
                logger.debug("%s: %s", directory, error)

    # -- writing a version ------------------------------------------------------------------------------------------

    def write_segment(self, directory: str, path: str, rows: Sequence[bytes], remote: bool) -> dict[str, Any]:
        """Write one table segment, here or to the remote tier."""
        decoded = [table.decode_row(r) for r in rows]
        data = table.encode_segment(decoded)
        if remote:
            target = f"{self.name}/{directory}/{path}"
            retried(lambda: self.remote.put(target, [data]), f"block table on {self.remote.label}")
        else:
            self.node.put(f"{self.name}/{directory}/{path}", data)
        outside = sorted({r.item for r in decoded if r.object.startswith(f"{r.item}/x/")})
        return {"nbytes": len(data), "sha256": roots.sha256(data), "outside_view": outside}

    def write_root(self, root: bytes) -> None:
        """Write the root and the zarr.json files here: this node then holds its part of a complete version."""
        full, documents = self._complete(root)
        base = f"{self.name}/{full.directory}"
        for path, data in documents.items():
            self.node.put(f"{base}/{path}", data)
        encoded = roots.encode(full)
        if self._remote is None:
            self._claim(full, encoded)
        self.node.put(f"{base}/{ROOT}", encoded)

    def take_run(self) -> int:
        return retried(
            lambda: commit.acquire_run(self.remote, self.name, self.run_uuid),
            f"taking a run number on {self.remote.label}",
        )

    def commit(self, root: bytes) -> None:
        full, documents = self._complete(root)
        retried(lambda: commit.commit(self.remote, full, documents), f"commit on {self.remote.label}")

    def check_place(self, version: int, attempt: str, run: int | None) -> None:
        """Raise VersionExists if a version's place is taken by another attempt, or a later run owns the name."""
        try:
            found = commit.read_root(self.remote, self.name, version)
            newest = commit.newest_run(self.remote, self.name)
        except OSError as error:
            logger.info("%s cannot be read either: %s", self.remote.label, error)
            return
        if found is not None and not (isinstance(found, roots.Root) and found.attempt == attempt):
            raise VersionExists(
                f"{self.name!r} version {version} on {self.remote.label}: another attempt has its place"
            )
        if run is not None and newest > run:
            raise VersionExists(
                f"{self.name!r} version {version} on {self.remote.label}: run {newest} has taken over this name, run {run} may "
                "not commit any more"
            )

    @staticmethod
    def _complete(root: bytes) -> tuple[roots.Root, dict[str, bytes]]:
        """The root with the digests of its zarr.json files, and these."""
        partial = roots.decode(root, where="message")
        assert isinstance(partial, roots.Root)
        found = roots.documents(partial.items, {"veloc_dask": {"name": partial.name, "version": partial.version}})
        digests = {path: roots.sha256(data) for path, data in found.items()}
        return msgspec.structs.replace(partial, documents=digests), found

    def _claim(self, root: roots.Root, encoded: bytes) -> None:
        """Without a remote tier, the node is where two clusters would meet: take the version's place on it."""
        relative = f"{self.name}/{layout.root_name(root.version)}"
        for _, path in self.node.copies(relative):
            holder = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES), where=path)
            if isinstance(holder, roots.Root) and holder.attempt != root.attempt:
                if self.node.entries(f"{self.name}/{holder.directory}"):
                    raise VersionExists(
                        f"{self.name!r} version {root.version} exists on this node already (attempt {holder.attempt}); "
                        "save again with a higher version"
                    )
                self.node.remove(relative)
        if self.node.tiers[0].create(relative, encoded):
            return
        for _, path in self.node.copies(relative):
            holder = roots.decode(files.read(path, limit=roots.MAX_ROOT_NBYTES), where=path)
            if isinstance(holder, roots.Root) and holder.attempt == root.attempt:
                return  # another worker of this node has written it for us
        raise VersionExists(
            f"{self.name!r} version {root.version}: another cluster on this node was faster; save again with a higher version"
        )

    # -- deleting ---------------------------------------------------------------------------------------------------

    def retain(self, remote: bool, run: int | None, pinned: Collection[str], active: Collection[str]) -> dict[str, Any]:
        """A round of retention, here or on the remote tier."""
        keep = self.config.keep
        if remote:
            removed = retention.retain_remote(
                self.remote, self.name, keep=keep, run=run, pinned=set(pinned), active=set(active)
            )
        else:
            removed = retention.retain_local(
                self.node, self.name, keep=keep, pinned=set(pinned), active=set(active), run_uuid=self.run_uuid
            )
        self._owned.difference_update(removed.directories)
        return {"versions": removed.versions, "directories": removed.directories}

    def delete(self, version: int, remote: bool, pinned: Collection[str]) -> None:
        if remote:
            directory = retention.forget_remote(self.remote, self.name, version, run=0)
            if directory is not None and directory not in pinned:
                retention.remove_forgotten(self.remote, self.name, directory, run=0)
            return
        for entry in self.node.entries(self.name):
            attempt = layout.parse_attempt(entry)
            if attempt is not None and attempt[0] == version:
                if entry in pinned:
                    self.node.remove(f"{self.name}/{entry}/{ROOT}")
                else:
                    retention.forget_local(self.node, self.name, entry)

    def clean(self, directory: str, *, local: bool, remote: bool) -> None:
        """Remove what an attempt that was given up has left on this node and on the remote tier."""
        try:
            if local:
                retention.forget_local(self.node, self.name, directory)
            if remote:
                retention.discard_remote(self.remote, self.name, directory, run=0, may_commit=False)
        except OSError as error:
            logger.warning(
                "what %s left could not be removed, a later round of retention does it: %s", directory, error
            )

    # -- what there is ----------------------------------------------------------------------------------------------

    def list_remote(self) -> bytes:
        def read() -> RemoteList:
            taken = commit.committed(self.remote, self.name)
            versions, problems = [], []
            for version in taken:
                try:
                    found = commit.read_root(self.remote, self.name, version)
                except IntegrityError as error:
                    problems.append(str(error))
                    continue
                if isinstance(found, roots.Root):
                    versions.append(RemotePart(found.directory, version, found.nblocks, found.nbytes, found.created))
            return RemoteList(tuple(versions), tuple(taken), tuple(problems))

        return messages.encode(retried(read, f"listing {self.remote.label}"))

    def list_local(self) -> bytes:
        parts = []
        for entry in self.node.entries(self.name):
            root = retention.local_root(self.node, self.name, entry) if layout.parse_attempt(entry) else None
            if root is None:
                continue
            present, missing = [], []
            for segment, data in self._local_segments(root):
                present.append(segment.path)
                missing += [r.object for r in table.decode_segment(data) if not self._has(entry, r)]
            parts.append(
                LocalPart(
                    directory=entry,
                    version=root.version,
                    run=-1 if root.run is None else root.run,
                    nblocks=root.nblocks,
                    nbytes=root.nbytes,
                    created=root.created,
                    segments=tuple(s.path for s in root.segments),
                    present=tuple(present),
                    missing=tuple(missing[:10]),
                    nmissing=len(missing),
                )
            )
        return msgspec.msgpack.encode(parts)

    def _has(self, directory: str, row: table.Row) -> bool:
        """Whether a copy of about the right size exists (its checksum is verified when it is read)."""
        path = block_path(self.name, directory, row.object)
        needed = row.offset + row.stored_nbytes
        try:
            if any(os.stat(p).st_size >= needed for _, p in self.node.copies(path)):
                return True
            size = self._remote.size(path) if self._remote is not None else None
        except OSError:
            return False
        return size is not None and size >= needed

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_version(self, directory: str, version: int, remote: bool) -> dict[str, Any]:
        """Root and table of a version, or this node's part of them (an empty root: none)."""
        root, segments = self._read_table(directory, version, remote)
        return {
            "root": roots.encode(root) if root is not None else b"",
            "segments": {s.path: data for s, data in segments},
        }

    def _read_table(
        self, directory: str, version: int, remote: bool
    ) -> tuple[roots.Root | None, list[tuple[roots.Segment, bytes]]]:
        if not remote:
            root = retention.local_root(self.node, self.name, directory)
            return root, [] if root is None else list(self._local_segments(root))
        found = commit.read_root(self.remote, self.name, version)
        if not isinstance(found, roots.Root) or found.directory != directory:
            raise BlockLost(
                f"{self.name!r} version {version} is gone from {self.remote.label}: it was deleted meanwhile"
            )
        return found, list(self._remote_segments(found))

    def _local_segments(self, root: roots.Root) -> Iterator[tuple[roots.Segment, bytes]]:
        """The valid table segments of a version on this node."""
        for segment in root.segments:
            for _, path in self.node.copies(f"{self.name}/{root.directory}/{segment.path}"):
                try:
                    data = files.read(path, limit=table.MAX_SEGMENT_NBYTES).tobytes()
                except OSError as error:
                    logger.warning("a table segment cannot be read: %s", error)
                    continue
                if len(data) == segment.nbytes and roots.sha256(data) == segment.sha256:
                    yield segment, data
                    break
                logger.warning("%s: a damaged table segment is not used", path)

    def _remote_segments(self, root: roots.Root) -> Iterator[tuple[roots.Segment, bytes]]:
        for segment in root.segments:
            path = f"{self.name}/{root.directory}/{segment.path}"
            try:
                data = self.remote.get(path, limit=table.MAX_SEGMENT_NBYTES).tobytes()
            except FileNotFoundError as error:
                raise IntegrityError(f"{self.remote.label}/{path}: this part of the block table is missing") from error
            if len(data) != segment.nbytes or roots.sha256(data) != segment.sha256:
                raise IntegrityError(
                    f"{self.remote.label}/{path}: expected {segment.nbytes} bytes with sha256 {segment.sha256[:12]}..., "
                    f"found {len(data)} with {roots.sha256(data)[:12]}...; the block table is torn or was changed"
                )
            yield segment, data

    def copies(self, block: BlockRef, row: table.Row) -> Iterator[Copy]:
        """Where this worker itself can read a block: its node's tiers, then the remote tier."""
        yield from reader.local_copies(self.node, block.name, block.directory, row)
        if block.remote and self._remote is not None:
            yield reader.remote_copy(self._remote, block.name, block.directory, row)

    def read_here(self, block: BlockRef) -> Bytes:
        row = table.decode_row(block.row)
        return reader.read_verified(row, self.copies(block, row), what=f"{block.name!r} {block.directory}")

    def read_block(self, ref: bytes) -> Any:
        """The verified stored bytes of a block, for a client or a peer."""
        return self.read_here(messages.decode(ref, BlockRef)).data

    def _verify_documents(self, root: roots.Root, remote: bool) -> list[str]:
        """What is wrong with the zarr.json files of a version."""
        problems = []
        for path, digest in root.documents.items():
            relative = f"{self.name}/{root.directory}/{path}"
            try:
                if remote:
                    data = self.remote.get(relative, limit=roots.MAX_ROOT_NBYTES)
                else:
                    data = files.read(next(p for _, p in self.node.copies(relative)), limit=roots.MAX_ROOT_NBYTES)
                if roots.sha256(data) != digest:
                    problems.append(f"{relative}: its checksum does not match; the file is torn or was changed")
            except StopIteration:
                problems.append(f"{relative}: is missing")
            except OSError as error:
                problems.append(f"{relative}: {error}")
        return problems

    def verify(self, directory: str, version: int, remote: bool) -> dict[str, Any]:
        """Read and check every block of a version that this node, or the remote tier, holds."""
        root, segments = self._read_table(directory, version, remote)
        nblocks = nbytes = 0
        problems = [] if root is None else self._verify_documents(root, remote)
        for _, data in segments:
            for row in table.decode_segment(data):
                if remote:
                    copies = iter([reader.remote_copy(self.remote, self.name, directory, row)])
                else:
                    copies = reader.local_copies(self.node, self.name, directory, row)
                try:
                    reader.read_verified(row, copies, what=f"{self.name!r} version {version}")
                except IntegrityError as error:
                    problems.append(str(error))
                nblocks += 1
                nbytes += row.stored_nbytes
        return {"nblocks": nblocks, "nbytes": nbytes, "problems": problems}
