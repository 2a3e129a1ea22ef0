"""SIGKILL of a rank at a random moment, with saves that training waits for and saves behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, random, sys
from pathlib import Path
from benchmarks.support.kill import killed_until_through, losses_of_one_run
root, chance = Path(sys.argv[1]), random.Random(3)
expected = losses_of_one_run(root / "reference")
outcomes = [killed_until_through(root / f"run-{b}", expected, chance, 2 - b, behind=bool(b)) for b in (0, 1)]
print(json.dumps([outcome.kills for outcome in outcomes]))
"""


@pytest.mark.slow
def test_killed_three_times(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2], timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert sum(json.loads(done.stdout.splitlines()[-1])) == 3
