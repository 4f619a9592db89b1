"""What a newcomer runs first: the demo and the example, as they would, with the figures that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*args: str, cwd: Path, timeout_s: float) -> str:
    """The output of a Python process that must succeed."""
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def figures(output: str) -> dict[str, int]:
    return {name: int(figure) for name, figure in re.findall(r"^([a-z ]+): (\d+)$", output, re.MULTILINE)}


@pytest.mark.slow
def test_demo_computes_nothing_twice_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = Path("/dev/shm")
    before = set(shared.glob("veloc-demo-*"))

    output = run("-m", "veloc_dask.cli", "demo", cwd=tmp_path, timeout_s=120)

    again = re.findall(r"^ +tasks run again +(\d+) +(?:all )?(\d+)$", output, re.MULTILINE)
    assert len(again) == 2, output
    assert [int(ours) for ours, _ in again] == [0, 0]
    assert all(int(plain) > 100 for _, plain in again), "a plain cluster has to run most of the job again"
    lost = re.search(r"^ +worker killed at step \d+: blocks lost +(\d+) +(\d+)$", output, re.MULTILINE)
    assert lost is not None, output
    assert int(lost[1]) > 0
    assert "equal, bit for bit" in output
    assert "128 blocks, 256.0 MiB" in output
    assert all(len(line) <= 80 for line in output.splitlines() if str(tmp_path) not in line), output
    assert not list(tmp_path.iterdir())
    assert set(shared.glob("veloc-demo-*")) <= before


@pytest.mark.slow
def test_flights_are_shuffled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    output = run(str(ROOT / "examples" / "flights.py"), cwd=tmp_path, timeout_s=150)

    counted = figures(output)
    assert counted["flights"] == 336_776
    assert counted["joined"] == 336_776
    assert counted["partitions lost"] > 0
    assert counted["partitions prepared"] == 7
    assert counted["partitions prepared again"] == 0
    assert counted["shuffle tasks"] > counted["partitions prepared"]
    assert counted["shuffle tasks run again"] == 0
    assert "restored with 2 workers instead of 3: equal" in output
    assert not list(tmp_path.iterdir())
