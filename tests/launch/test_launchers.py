"""torchrun with one agent and with two, and SLURM's variables: all train as one process does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.common import PROGRAM, environment, free_port, losses, run_all, torchrun
from tests.launch.program import STEPS

pytestmark = [pytest.mark.example, pytest.mark.timeout(600)]
SECONDS = 250.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("one")
    ((status, output),) = run_all([([sys.executable, *PROGRAM, str(folder), "--one_process"], environment())], SECONDS)
    assert status == 0, output
    found = losses(folder, 0)
    assert len(found) == STEPS
    return found


def _equal(folder: Path, reference: dict[int, float]) -> None:
    for rank in range(2):
        found = losses(folder, rank)
        assert found.keys() == reference.keys()
        assert list(found.values()) == pytest.approx(list(reference.values()), rel=1e-5)


def test_torchrun_with_one_agent(tmp_path: Path, reference: dict[int, float]) -> None:
    command = torchrun("--standalone", "--nproc_per_node=2", *PROGRAM, str(tmp_path), "--devices=2")
    ((status, output),) = run_all([(command, environment())], SECONDS)
    assert status == 0, output
    _equal(tmp_path, reference)


def test_torchrun_with_two_agents_that_meet_by_c10d(tmp_path: Path, reference: dict[int, float]) -> None:
    agent = torchrun(
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv_id=launch-test",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
        "--local_addr=127.0.0.1",
        *PROGRAM,
        str(tmp_path),
        "--devices=1",
        "--num_nodes=2",
    )
    results = run_all([(agent, environment()), (agent, environment())], SECONDS)
    for status, output in results:
        assert status == 0, output
    text = "".join(output for _, output in results)
    assert "data_parallel_replicate  2" in text  # one copy per node
    _equal(tmp_path, reference)


def test_slurm_by_its_variables(tmp_path: Path, reference: dict[int, float]) -> None:
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, *PROGRAM, str(tmp_path), "--devices=1", "--num_nodes=2"]
    tasks = [
        (command, environment(**common, SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_NODEID=str(rank)))
        for rank in range(2)
    ]
    for status, output in run_all(tasks, SECONDS):
        assert status == 0, output
    _equal(tmp_path, reference)


def test_devices_and_nodes_that_do_not_match_the_launcher_are_refused(tmp_path: Path) -> None:
    command = torchrun("--standalone", "--nproc_per_node=2", *PROGRAM, str(tmp_path), "--devices=4")
    ((status, output),) = run_all([(command, environment())], SECONDS)
    assert status != 0
    assert "2 ranks were started; devices=4 x num_nodes=1 = 4" in output
