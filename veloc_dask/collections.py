"""What a user saves, taken apart into items and blocks, and put together again.

A saved value is any nesting of dict, list and tuple. Its leaves are Dask collections and futures (one block per key),
JSON scalars (they go into the root itself), and any other Python object (encoded here, at the moment of the save). What a
collection needs to be rebuilt goes into its item's recipe as JSON; what JSON cannot hold exactly (an empty dataframe, a
time-stamped division) is one more small item. Futures and tokens are never stored.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import dask.array as da
import msgspec
import numpy as np
from dask.base import is_dask_collection
from dask.core import flatten
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Actor, Future

from veloc_dask.errors import CheckpointNotFound, IntegrityError, NotSupported, VelocError
from veloc_dask.scheduler_plugin import internals
from veloc_dask.storage import layout
from veloc_dask.storage.blocks import ItemSpec, array_item, dtype_from_text, dtype_text
from veloc_dask.storage.root import Item
from veloc_dask.storage.writer import FrozenBlock, freeze

_JSON_INT = 2**53  # beyond this other JSON readers round
OBJECT_DTYPE = "object"


def kind_of(value: Any) -> str | None:
    """The kind of item that a Dask leaf becomes, None for anything else."""
    if isinstance(value, Future):
        return "future"
    if not is_dask_collection(value):
        return None
    if isinstance(value, da.Array):
        return "array"
    if isinstance(value, Delayed):
        return "delayed"
    module = type(value).__module__
    if module.startswith("dask.dataframe") and hasattr(value, "divisions"):
        return "frame"
    if module.startswith("dask.bag") and hasattr(value, "npartitions"):
        return "bag"
    raise NotSupported(
        f"a Dask collection of type {type(value).__module__}.{type(value).__qualname__} cannot be saved yet; save the arrays, "
        "dataframes or delayed objects that it consists of"
    )


def leaves(value: Any) -> Iterator[Any]:
    """The Dask leaves of a saved value, in order."""
    if type(value) is dict:
        value = list(value.values())
    if type(value) in (list, tuple):
        for part in value:
            yield from leaves(part)
    elif kind_of(value) is not None:
        yield value


def replace_leaves(value: Any, new: Callable[[Any], Any]) -> Any:
    """The same nesting with each Dask leaf replaced by ``new(leaf)``."""
    if type(value) is dict:
        return {k: replace_leaves(v, new) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_leaves(v, new) for v in value)
    return new(value) if kind_of(value) is not None else value


def keys_of(leaf: Any) -> list[Any] | None:
    """The keys of a Dask leaf's blocks, in order; None if one of them is still to be computed."""
    if isinstance(leaf, Future):
        return [leaf.key]
    graph = leaf.__dask_graph__()
    return internals.future_keys(graph, flatten(leaf.__dask_keys__()))


def persist(client: Any, value: Any) -> Any:
    """The same nesting with its lazy collections persisted.

    Dataframes go with one call and everything else with another: submitted together, Dask would give up the optimisation of
    the dataframes. In one call the kinds stand together, since Dask (2026.8) mixes up the results of alternating ones.
    """
    found = {id(leaf): leaf for leaf in leaves(value) if keys_of(leaf) is None}
    lazy = dict(sorted(found.items(), key=lambda pair: str(kind_of(pair[1]))))
    persisted: dict[int, Any] = {}
    for frames in (True, False):
        group = {i: leaf for i, leaf in lazy.items() if (kind_of(leaf) == "frame") is frames}
        if group:
            persisted.update(zip(group, client.persist(list(group.values())), strict=True))
    return replace_leaves(value, lambda leaf: persisted.get(id(leaf), leaf)) if persisted else value


class Parts(msgspec.Struct):
    """A saved value taken apart."""

    structure: Any
    items: list[Item]
    keys: list[list[Any]]  # per item, in the order of its blocks; a placeholder for plain objects
    plain: dict[int, FrozenBlock]  # item -> encoded object


def take_apart(value: Any, *, allow_pickle: bool) -> Parts:
    """Take a value, whose Dask leaves are persisted, apart.

    Raises
    ------
    NotSupported
        Something in it cannot be saved; the message says what and where.
    """
    return _Taker(allow_pickle).run(value)


class _Taker:
    def __init__(self, allow_pickle: bool) -> None:
        self.parts = Parts(None, [], [], {})
        self.taken: set[str] = set()
        self.allow_pickle = allow_pickle
        self.seen: dict[int, int] = {}  # id of a leaf -> its item: the same object twice is one item

    def run(self, value: Any) -> Parts:
        self.parts.structure = self.node(value, ())
        return self.parts

    def node(self, value: Any, where: tuple[object, ...]) -> Any:
        if type(value) is dict:
            keys = [self.key(k, where) for k in value]
            return {"type": "dict", "keys": keys, "values": [self.node(v, (*where, k)) for k, v in value.items()]}
        if type(value) in (list, tuple):
            return {"type": type(value).__name__, "values": [self.node(v, (*where, i)) for i, v in enumerate(value)]}
        scalar = json_scalar(value)
        if scalar is not None:
            return scalar
        if isinstance(value, Actor) or (isinstance(value, Future) and getattr(value, "actor", False)):
            raise NotSupported(f"{_text(where)}: is an actor; actors live in one worker's memory and are not saved")
        if id(value) in self.seen:
            return {"type": "item", "item": self.seen[id(value)]}
        kind = kind_of(value)
        path = layout.item_path(where, self.taken)
        take = functools.partial(self.plain, kind="object") if kind is None else getattr(self, f"_{kind}")
        number = take(value, path, where=where)
        self.seen[id(value)] = number
        return {"type": "item", "item": number}

    def key(self, key: Any, where: tuple[object, ...]) -> Any:
        if type(key) is tuple:
            return {"type": "tuple", "values": [self.key(k, where) for k in key]}
        scalar = json_scalar(key)
        if scalar is None:
            raise NotSupported(
                f"{_text(where)}: a dict key of type {type(key).__name__}; keys may be str, int, float, bool, None or tuples"
            )
        return scalar

    def add(self, kind: str, spec: ItemSpec, recipe: dict[str, Any], leaf: Any, where: tuple[object, ...]) -> int:
        keys = keys_of(leaf)
        if keys is None or len(keys) != math.prod(spec.grid):
            raise VelocError(
                f"{_text(where)}: expected the futures of {math.prod(spec.grid)} blocks, found {keys and len(keys)}"
            )
        self.parts.items.append(Item(kind, spec, recipe))
        self.parts.keys.append(keys)
        return len(self.parts.items) - 1

    def plain(self, value: Any, path: str, *, kind: str, where: tuple[object, ...]) -> int:
        spec = ItemSpec(path, "blocks", ())
        try:
            block = freeze(value, spec, allow_pickle=self.allow_pickle)
            if block.encoding == "pickle":
                _Finder(_Sink()).dump(value)
        except NotSupported as error:
            raise NotSupported(f"{_text(where)}: {error}") from error
        except Exception as error:
            raise NotSupported(
                f"{_text(where)}: an object of type {type(value).__module__}.{type(value).__qualname__} cannot be saved: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.parts.items.append(Item(kind, spec))
        self.parts.keys.append([None])
        number = len(self.parts.items) - 1
        self.parts.plain[number] = block
        return number

    def meta(self, value: Any, where: tuple[object, ...]) -> int:
        return self.plain(value, f"{layout.META}/{len(self.parts.items)}", kind="meta", where=where)

    def _array(self, x: Any, path: str, where: tuple[object, ...]) -> int:
        text = OBJECT_DTYPE if x.dtype == np.dtype("O") else dtype_text(x.dtype)
        recipe: dict[str, Any] = {
            "chunks": [[None if math.isnan(c) else int(c) for c in dim] for dim in x.chunks],
            "dtype": text,
        }
        if type(x._meta) is not np.ndarray or text is None:
            recipe["meta"] = self.meta(x._meta, where)
        return self.add("array", array_item(path, x.chunks, x.dtype), recipe, x, where)

    def _frame(self, df: Any, path: str, where: tuple[object, ...]) -> int:
        meta = df._meta
        recipe: dict[str, Any] = {"meta": self.meta(meta, where)}
        if df.known_divisions:
            scalars = [
                json_scalar(d.item() if isinstance(d, np.generic) and d.dtype.kind in "biufU" else d)
                for d in df.divisions
            ]
            if all(s is not None for s in scalars):
                recipe["divisions"] = scalars
            else:
                recipe["divisions_item"] = self._divisions(df.divisions, where)
        return self.add("frame", ItemSpec(path, "blocks", (df.npartitions,)), recipe, df, where)

    def _divisions(self, divisions: Sequence[Any], where: tuple[object, ...]) -> int:
        import pandas as pd

        as_index: Any = pd.Index(divisions)
        if len(as_index) == len(divisions) and all(
            type(a) is type(b) and (a == b or (a is pd.NaT and b is pd.NaT))
            for a, b in zip(as_index, divisions, strict=True)
        ):
            return self.meta(as_index, where)  # needs no pickle
        return self.meta(tuple(divisions), where)

    def _bag(self, bag: Any, path: str, where: tuple[object, ...]) -> int:
        return self.add("bag", ItemSpec(path, "blocks", (bag.npartitions,)), {}, bag, where)

    def _delayed(self, leaf: Any, path: str, where: tuple[object, ...]) -> int:
        return self.add("delayed", ItemSpec(path, "blocks", ()), {}, leaf, where)

    def _future(self, future: Any, path: str, where: tuple[object, ...]) -> int:
        if future.status in ("cancelled", "lost"):
            raise VelocError(
                f"{_text(where)}: the future {future.key!r} is {future.status}; save one that is pending or finished"
            )
        return self.add("future", ItemSpec(path, "blocks", ()), {}, future, where)


class _Sink:
    def write(self, data: Any) -> int:
        return len(data)


class _Finder(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Goes through an object as pickle does, and refuses Dask's own inside of it.

    A pickled future means nothing in another cluster, and a pickled lazy collection would be computed again.
    """

    def persistent_id(self, obj: Any) -> None:
        kind = type(obj)
        if kind not in _PLAIN and (issubclass(kind, (Future, Actor)) or hasattr(kind, "__dask_graph__")):
            raise NotSupported(
                f"holds an {kind.__name__} of Dask inside another object; put it into plain dict, list or tuple, or "
                "compute it first"
            )


_PLAIN = frozenset(
    {int, float, complex, str, bytes, bool, type(None), type, list, dict, tuple, set, np.ndarray, np.dtype}
)


def _text(where: Sequence[object]) -> str:
    return "value" + "".join(f"[{w!r}]" for w in where)


def json_scalar(value: Any) -> Any:
    """The structure node of a scalar that JSON holds exactly, None for anything else."""
    if value is None or type(value) is bool:
        return {"type": "value", "value": value}
    if type(value) is int:
        if abs(value) < _JSON_INT:
            return {"type": "value", "value": value}
        return {"type": "int", "value": hex(value)} if abs(value) < 2**65536 else None
    if type(value) is float:
        if math.isnan(value):
            return {"type": "float", "value": "nan"} if str(value) == "nan" and math.copysign(1, value) > 0 else None
        return {"type": "float", "value": value.hex()}
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return None  # a lone surrogate
        return {"type": "value", "value": value}
    return None


class Assembler:
    """Puts a version together again from its root, load tasks and plain objects.

    Parameters
    ----------
    task
        Makes the load task of block `number` (in C order of the grid) of an item, under a key.
    plain
        Decoded plain objects by item.
    """

    def __init__(
        self,
        items: Sequence[Item],
        prefix: str,
        task: Callable[[Any, int, int], Any],
        plain: dict[int, Any],
        client: Any,
    ) -> None:
        self._items = items
        self._prefix = prefix
        self._task = task
        self._plain = plain
        self._client = client
        self._built: dict[int, Any] = {}

    def build(self, node: Any) -> Any:
        kind = node["type"]
        if kind == "dict":
            return {self.build(k): self.build(v) for k, v in zip(node["keys"], node["values"], strict=True)}
        if kind == "list":
            return [self.build(v) for v in node["values"]]
        if kind == "tuple":
            return tuple(self.build(v) for v in node["values"])
        if kind == "value":
            return node["value"]
        if kind == "int":
            return int(node["value"], 16)
        if kind == "float":
            return float("nan") if node["value"] == "nan" else float.fromhex(node["value"])
        if kind == "item":
            return self.item(node["item"])
        raise IntegrityError(
            f"the root's structure holds a node of unknown type {kind!r}; it may be from a newer veloc_dask"
        )

    def item(self, number: int) -> Any:
        if number not in self._built:
            item = self._items[number]
            if item.kind in ("object", "meta"):
                self._built[number] = self._plain[number]
            else:
                self._built[number] = getattr(self, f"_{item.kind}")(number, item)
        return self._built[number]

    def _layer(self, number: int, item: Item) -> tuple[str, dict[Any, Any], list[Any]]:
        name = f"{self._prefix}-{number}"
        indices = list(itertools.product(*map(range, item.spec.grid)))
        keys = [(name, *(index or (0,))) if item.kind != "array" else (name, *index) for index in indices]
        layer = {key: self._task(key, number, position) for position, key in enumerate(keys)}
        return name, layer, keys

    def _graph(self, name: str, layer: dict[Any, Any]) -> HighLevelGraph:
        return HighLevelGraph({name: MaterializedLayer(layer)}, {name: set()})

    def _array(self, number: int, item: Item) -> Any:
        name, layer, _ = self._layer(number, item)
        recipe = item.recipe
        chunks = tuple(tuple(math.nan if c is None else c for c in dim) for dim in recipe["chunks"])
        text = recipe["dtype"]
        whole = tuple(map(sum, chunks))
        if tuple(map(len, chunks)) != item.spec.grid or (item.spec.form == "array" and whole != item.spec.shape):
            raise IntegrityError(f"item {item.spec.path!r}: its chunks {chunks} do not fit its grid {item.spec.grid}")
        if "meta" in recipe:
            meta = self.item(recipe["meta"])
            return da.Array(self._graph(name, layer), name, chunks, meta=meta, dtype=meta.dtype)
        dtype = np.dtype("O") if text == OBJECT_DTYPE else dtype_from_text(text)
        return da.Array(self._graph(name, layer), name, chunks, dtype=dtype, meta=np.empty((0,) * len(chunks), dtype))

    def _frame(self, number: int, item: Item) -> Any:
        from dask.dataframe import from_graph

        name, layer, keys = self._layer(number, item)
        recipe = item.recipe
        if "divisions" in recipe:
            divisions = tuple(self.build(d) for d in recipe["divisions"])
        elif "divisions_item" in recipe:
            divisions = tuple(self.item(recipe["divisions_item"]))
        else:
            divisions = (None,) * (len(keys) + 1)
        return from_graph(layer, self.item(recipe["meta"]), divisions, keys, name)

    def _bag(self, number: int, item: Item) -> Any:
        from dask.bag import Bag

        name, layer, keys = self._layer(number, item)
        return Bag(self._graph(name, layer), name, len(keys))

    def _delayed(self, number: int, item: Item) -> Any:
        name, layer, (key,) = self._layer(number, item)
        return Delayed(key, self._graph(name, layer), layer=name)

    def _future(self, number: int, item: Item) -> Any:
        # what was a future is one again: loading starts now, on the cluster
        return self._client.compute(self._delayed(number, item))


def select_nodes(structure: Any, select: Sequence[str] | None, name: str) -> Any:
    """The structure with only the selected keys of its top-level dict."""
    if select is None:
        return structure
    if isinstance(select, str):
        select = [select]
    if structure["type"] != "dict":
        raise CheckpointNotFound(f"{name}: select= needs a saved dict, found a {structure['type']}")
    pairs = [
        (k["value"], v, k) for k, v in zip(structure["keys"], structure["values"], strict=True) if k["type"] == "value"
    ]
    there = [k for k, _, _ in pairs]
    missing = [s for s in select if s not in there]
    if missing:
        raise CheckpointNotFound(f"{name}: no item {missing[0]!r}; it has {', '.join(map(repr, there))}")
    chosen = [(k, v) for key, v, k in pairs if key in select]
    return {"type": "dict", "keys": [k for k, _ in chosen], "values": [v for _, v in chosen]}


def items_in(node: Any, items: Sequence[Item]) -> set[int]:
    """The items that a part of a structure refers to, those that describe others included."""
    if node["type"] == "item":
        number = node["item"]
        if not 0 <= number < len(items):
            raise IntegrityError(f"the root's structure refers to item {number} of {len(items)}; it was changed")
        recipe = items[number].recipe
        return {number, *(recipe[k] for k in ("meta", "divisions_item") if k in recipe)}
    return {n for v in node.get("values", ()) for n in items_in(v, items)}
