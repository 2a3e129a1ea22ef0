"""The script of this folder as a test, where namespaces can be made."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch.common import ROOT, environment
from tests.multinode.run import is_possible

pytestmark = [pytest.mark.example, pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_nodes_train_fail_clearly_and_resume() -> None:
    # Two nodes on one machine are two network namespaces, which take rights that many containers do not have.
    if why := is_possible():
        pytest.skip(f"network namespaces cannot be made here: {why}")
    run = subprocess.run(
        [sys.executable, "-m", "tests.multinode.run"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(": 8 losses on 4 ranks equal those of one process") == 2
