"""Every fault point is passed by an ordinary run, has a name that is known, and costs nothing while nothing is armed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import veloc_dask.storage
from veloc_dask.storage import faults, retention
from veloc_dask.storage.remote import PosixRemote
from veloc_dask.storage.tiers import TierConfig, open_node
from veloc_dask.testing import faults as actions
from veloc_dask.testing import versions


def test_every_point_is_passed(tmp_path: Path) -> None:
    passed: dict[str, int] = {}

    def count(name: str) -> actions.Action:
        def action(**context: object) -> None:
            passed[name] = passed.get(name, 0) + 1

        return action

    with contextlib.ExitStack() as stack:
        for name in faults.POINTS:
            stack.enter_context(actions.arm(name, count(name)))
        node = open_node([TierConfig(str(tmp_path / "tier"))])
        stack.callback(node.close)
        remote = PosixRemote(str(tmp_path / "remote"))
        remote.open()
        versions.write(node, remote, "n", 1, 1)
        for version in (2, 3):
            versions.save(node, remote, "n", version, 1)
            versions.write_local(node, "n", version)
        retention.retain_remote(remote, "n", keep=1, run=1, pinned=(), active=())
        retention.retain_local(node, "n", keep=1, pinned=(), active=(), run_uuid="f" * 32)
    assert set(passed) == set(faults.POINTS)
    assert faults.armed == {}


def test_the_source_has_the_points_that_are_documented() -> None:
    found = set()
    for path in Path(veloc_dask.storage.__file__).parent.glob("*.py"):
        found |= set(re.findall(r'fault_point\(\s*"([^"]+)"', path.read_text()))
    assert found == set(faults.POINTS)


def test_an_unknown_point_cannot_be_armed() -> None:
    with pytest.raises(KeyError, match="there is no fault point"), actions.arm("file.opend", actions.kill):
        pass
    first, second = (actions.arm("file.opened", actions.delay(0)) for _ in range(2))
    with first, pytest.raises(RuntimeError, match="armed already"), second:
        pass


def test_actions(tmp_path: Path) -> None:
    remote = PosixRemote(str(tmp_path))
    with actions.arm("file.written", actions.on_path("bad", actions.on_call(2, actions.fail(28)))):
        remote.put("bad", [b"x"])
        remote.put("good", [b"x"])
        with pytest.raises(OSError, match="No space left"):
            remote.put("bad", [b"yy"])
        remote.put("bad", [b"zzz"])
    assert remote.get("bad").tobytes() == b"zzz"
