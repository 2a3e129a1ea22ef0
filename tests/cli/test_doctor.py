"""``pardist doctor`` here, and its advice for meshes that are not here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_pardist.cli.doctor_checks import advice
from lightning_pardist.specs.config import AxisSizes


@pytest.mark.example
@pytest.mark.timeout(300)
def test_two_processes_measure_their_links() -> None:
    command = [sys.executable, "-m", "lightning_pardist.cli.main", "doctor", "--processes=2", "--megabytes=1"]
    found = subprocess.run([*command, "--timeout=200"], capture_output=True, text=True, timeout=280, check=False)
    assert found.returncode == 0, found.stderr
    for text in ("torch", "lightning_pardist", "infiniband", "backend gloo", "Advice"):
        assert text in found.stdout
    lines = [line for line in found.stdout.splitlines() if "data_parallel_shard" in line and "GB/s" in line]
    assert [("all_reduce" in line, "all_to_all" in line) for line in lines] == [(True, False), (False, True)]


def test_advice() -> None:
    inside = advice(AxisSizes(data_parallel_replicate=4, data_parallel_shard=8), 8, 4)
    assert inside == ["nothing to change: the axes that talk most stay within a node"]
    across = advice(AxisSizes(data_parallel_shard=2, tensor_parallel=16), 8, 4)
    assert "tensor_parallel crosses nodes" in across[0] and "data_parallel_shard crosses nodes" in across[1]
