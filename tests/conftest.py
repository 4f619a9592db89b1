"""Fixtures of the tests that need a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# worker processes get this path as well, and import from it the functions that they run
sys.path.insert(0, str(Path(__file__).parent))

import support

PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(scope="module")
def shared_bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[support.Bed]:
    """One cluster for all tests of a module. ``BED`` in the module holds options for it."""
    bed = support.Bed(tmp_path_factory.mktemp("bed"), **getattr(request.module, "BED", {}))
    yield bed
    bed.close()


@pytest.fixture
def bed(shared_bed: support.Bed, request: pytest.FixtureRequest) -> Iterator[support.Bed]:
    """The module's cluster, complete and valid before the test, and found clean after it."""
    shared_bed.settle()
    shared_bed.validate()
    yield shared_bed
    shared_bed.validate()
    shared_bed.close_checkpointers()
    if request.node.stash.get(PASSED, False):  # the traceback of a failed test keeps its futures
        shared_bed.assert_clean()


@pytest.fixture
def log(tmp_path: Path) -> str:
    """The file in which the functions of a test count their runs."""
    return str(tmp_path / "runs")
