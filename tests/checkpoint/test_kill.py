"""SIGKILL of a rank at any moment: what was published before is there, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import LONG


def _kill(folder: Path, kills: int, seed: int, timeout: float) -> dict[str, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.checkpoint.kill", str(folder / "runs"), str(kills), str(seed)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=root, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_a_few_times(tmp_path: Path) -> None:
    assert _kill(tmp_path, kills=4, seed=1, timeout=280)["kills"] == 4


@pytest.mark.slow
@LONG
@pytest.mark.timeout(900)
def test_killed_twenty_times(tmp_path: Path) -> None:
    assert _kill(tmp_path, kills=20, seed=2, timeout=880)["kills"] == 20
