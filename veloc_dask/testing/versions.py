"""Small versions: writing one as a cluster does, and checking that a store holds nothing but whole ones."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from veloc_dask.storage import blocks, commit, files, layout, reader, table
from veloc_dask.storage import root as roots
from veloc_dask.storage.remote import Remote
from veloc_dask.storage.tiers import Node, block_path
from veloc_dask.storage.writer import Stored, Writer

Array = npt.NDArray[np.int64]


def values(version: int, attempt: str, nblocks: int = 2, length: int = 8) -> list[Array]:
    """What `write` saves by default: every attempt has numbers of its own."""
    seed = int(attempt[:8], 16) + version
    return [np.arange(length, dtype="i8") + seed + 1000 * b for b in range(nblocks)]


def _capture(
    node: Node, remote: Remote | None, name: str, directory: str, spec: blocks.ItemSpec, saved: Sequence[Array]
) -> list[Stored]:
    writer = Writer(name, node, remote)
    return [writer.store(v, spec, (n,), directory, allow_pickle=False) for n, v in enumerate(saved)]


def _root(
    name: str, version: int, attempt: str, run: int | None, node: str, spec: blocks.ItemSpec, rows: Sequence[table.Row]
) -> tuple[roots.Root, dict[str, bytes], bytes]:
    """The root, the zarr.json files and the only table segment."""
    segment = table.encode_segment(rows)
    items = [roots.Item("array", spec)]
    documents = roots.documents(items, {})
    root = roots.Root(
        format=roots.FORMAT,
        format_version=roots.FORMAT_VERSION,
        name=name,
        version=version,
        attempt=attempt,
        run=run,
        run_uuid=uuid.uuid4().hex,
        created="",
        structure=None,
        items=items,
        segments=[roots.Segment(layout.segment_path(0), node, len(rows), len(segment), roots.sha256(segment))],
        documents={p: roots.sha256(d) for p, d in documents.items()},
        nblocks=len(rows),
        nbytes=sum(r.nbytes for r in rows),
    )
    return root, documents, segment


def write(
    node: Node, remote: Remote, name: str, version: int, run: int, *, attempt: str = "", saved: Sequence[Array] = ()
) -> tuple[roots.Root, dict[str, bytes]]:
    """Capture, flush and write the table; everything but the commit."""
    attempt = attempt or uuid.uuid4().hex
    saved = saved or values(version, attempt)
    directory = layout.attempt_name(version, attempt)
    spec = blocks.array_item("u", (tuple(len(v) for v in saved),), saved[0].dtype)
    captured = _capture(node, remote, name, directory, spec, saved)
    objects = []
    for stored in captured:
        if stored.node:
            copies = reader.local_copies(node, name, directory, stored.row)
            data = reader.read_verified(stored.row, copies, what="flush")
            objects.append((block_path(name, directory, stored.row.object), [data]))
    remote.put_many(objects)
    root, documents, segment = _root(name, version, attempt, run, node.uuid, spec, [s.row for s in captured])
    remote.put(f"{name}/{directory}/{root.segments[0].path}", [segment])
    return root, documents


def save(node: Node, remote: Remote, name: str, version: int, run: int, **options: Any) -> roots.Root:
    """Write and commit a version."""
    root, documents = write(node, remote, name, version, run, **options)
    commit.commit(remote, root, documents)
    return root


def write_local(node: Node, name: str, version: int, *, attempt: str = "") -> roots.Root:
    """A version that lies on the node's tiers only, complete."""
    attempt = attempt or uuid.uuid4().hex
    saved = values(version, attempt)
    directory = layout.attempt_name(version, attempt)
    spec = blocks.array_item("u", (tuple(len(v) for v in saved),), saved[0].dtype)
    captured = _capture(node, None, name, directory, spec, saved)
    root, _, segment = _root(name, version, attempt, None, node.uuid, spec, [s.row for s in captured])
    node.put(f"{name}/{directory}/{root.segments[0].path}", segment)
    node.put(f"{name}/{directory}/root.json", roots.encode(root))
    return root


def read(remote: Remote, root: roots.Root) -> list[Array]:
    """All blocks of a version, verified."""
    found = []
    for segment in root.segments:
        data = remote.get(f"{root.name}/{root.directory}/{segment.path}").tobytes()
        if len(data) != segment.nbytes or roots.sha256(data) != segment.sha256:
            raise AssertionError(f"{root.directory}/{segment.path} is not what the root says")
        for row in table.decode_segment(data):
            copies = [reader.remote_copy(remote, root.name, root.directory, row)]
            stored = reader.read_verified(row, copies, what=root.directory)
            found.append(reader.decode(row, root.items[0].spec, stored, allow_pickle=False))
    if len(found) != root.nblocks:
        raise AssertionError(f"{root.directory}: expected {root.nblocks} blocks, found {len(found)}")
    for path, digest in root.documents.items():
        if roots.sha256(remote.get(f"{root.name}/{root.directory}/{path}").tobytes()) != digest:
            raise AssertionError(f"{root.directory}/{path} is not what the root says")
    return found


def assert_whole(remote: Remote, name: str) -> dict[int, str]:
    """Every version that a reader sees is whole and holds its own attempt's numbers; their attempts by version."""
    seen = {}
    for version in commit.committed(remote, name):
        root = commit.read_root(remote, name, version)
        if isinstance(root, roots.Root):
            for found, expected in zip(read(remote, root), values(version, root.attempt), strict=True):
                np.testing.assert_array_equal(found, expected)
            seen[version] = root.attempt
    return seen


def rows(node: Node, root: roots.Root) -> list[table.Row]:
    """The table of a version that lies on the node's tiers."""
    found = []
    for segment in root.segments:
        for tier, path in node.copies(f"{root.name}/{root.directory}/{segment.path}"):
            found += table.decode_segment(files.read(path, base=tier.home).tobytes())
            break
    return found
