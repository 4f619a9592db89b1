"""Every item gets a directory of its own, whatever the keys of the saved value are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloc_dask.storage import layout
from veloc_dask.storage.errors import ConfigError

HOSTILE = ["", ".", "..", "/", "a/b", "a\\b", "a\0b", "C:", "con", "zarr.json", "ZARR.JSON", "x.json", "table", "TABLE"]
HOSTILE += [
    "_meta",
    "_META",
    "c",
    "x",
    "1",
    "1=2",
    "a=",
    "a",
    "A",
    "a b",
    "a_b",
    "ä",
    "\ud800",
    "e\u0301",
    "é",
    "İ",
    "\n",
]
HOSTILE += ["a" * 80, "a" * 81, "a" * 5000, ".tmp-1", ".bad-0", "-", "--help", "root.json", " a", "a ", "a."]
keys = st.sampled_from(HOSTILE) | st.text(max_size=6) | st.integers() | st.floats() | st.booleans() | st.none()
values = st.recursive(
    st.just(0), lambda inner: st.dictionaries(keys, inner, max_size=5) | st.lists(inner, max_size=3), max_leaves=25
)


def leaves(value: Any, where: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*where, key))]
    if isinstance(value, list):
        return [leaf for n, inner in enumerate(value) for leaf in leaves(inner, (*where, n))]
    return [where]


def assert_safe(paths: list[str]) -> None:
    folded = [p.casefold() for p in paths]
    assert len(set(folded)) == len(paths), "two items share a directory on a file system that folds case"
    for path in folded:
        parts = path.split("/")
        layout.check_object(path + "/c/0/0")
        assert path.isascii()
        assert len(path) < 600
        assert parts[0] not in (layout.META, layout.TABLE)
        for part in parts:
            assert 0 < len(part) < 255
            assert part[0] != "."
            assert not part.endswith(".json")
        for depth in range(1, len(parts)):
            assert "/".join(parts[:depth]) not in folded, "an item lies inside another one"


@settings(derandomize=True, deadline=None, max_examples=400)
@given(values)
def test_paths_are_unique_and_safe(value: Any) -> None:
    taken: set[str] = set()
    where = leaves(value)
    paths = [layout.item_path(w, taken) for w in where]
    assert_safe(paths)
    again: set[str] = set()
    assert [layout.item_path(w, again) for w in where] == paths


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1,), ("1", "c", "0")),
        (("1", "c", "0"), (1,)),
        (("A",), ("a", "x")),
        (("a", "x"), ("A",)),
        (("a", "x"), ("A", "X")),
        ((None,), ("None",)),
        ((1,), (True, 1)),
    ],
)
def test_an_item_never_lies_inside_another_one(first: tuple[object, ...], second: tuple[object, ...]) -> None:
    taken: set[str] = set()
    assert_safe([layout.item_path(first, taken), layout.item_path(second, taken)])


def test_plain_words_stay_what_they_are() -> None:
    taken: set[str] = set()
    assert layout.item_path((), taken) == "value"
    assert layout.item_path(("u",), taken) == "u"
    assert layout.item_path(("state", "T_air", 0), taken) == "state/T_air/0"
    assert layout.item_path(("state", "q.v"), taken) == "state/q.v"


def test_the_paths_work_on_a_file_system(tmp_path: Path) -> None:
    taken: set[str] = set()
    for key in HOSTILE:
        for inner in HOSTILE:
            (tmp_path / layout.item_path((key, inner), taken)).mkdir(parents=True)
    assert sum(not directories for _, directories, _ in os.walk(tmp_path)) == len(HOSTILE) ** 2


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.text(max_size=40) | st.sampled_from(HOSTILE))
def test_checkpoint_names_are_safe_or_refused(name: str) -> None:
    try:
        layout.check_name(name)
    except ConfigError:
        return
    assert name.isascii()
    assert "/" not in name
    assert name[0] != "."
    assert len(name) <= 128


@pytest.mark.parametrize("version", [-1, 10**8, 1.0, "1", True, None])
def test_version_numbers_that_no_path_has_are_refused(version: object) -> None:
    with pytest.raises(ConfigError, match="expected an int"):
        layout.check_version(version)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, layout.MAX_VERSION), st.uuids())
def test_names_of_the_format_round_trip(version: int, uuid: Any) -> None:
    assert layout.parse_root(layout.root_name(version)) == version
    assert layout.parse_attempt(layout.attempt_name(version, uuid.hex)) == (version, uuid.hex)
    assert layout.parse_protected(layout.protected_name(uuid.hex)) == uuid.hex
    assert layout.parse_run(layout.run_name(version)) == version
    for other in (layout.root_name(version), layout.protected_name(uuid.hex), layout.run_name(version)):
        assert layout.parse_attempt(other) is None
    assert layout.parse_root(layout.attempt_name(version, uuid.hex)) is None
