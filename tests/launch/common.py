"""Starts launchers and reads what their ranks noted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("-m", "tests.launch.program")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    foreign = ("SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_")
    names = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(foreign)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(*arguments: str) -> list[str]:
    """The command line of torchrun, by the interpreter that runs the tests."""
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def run_all(commands: Sequence[tuple[list[str], dict[str, str]]], timeout_s: float) -> list[tuple[int, str]]:
    """Runs commands at the same time; returns exit status and output of each. None outlives the call."""
    started = [
        subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        for command, env in commands
    ]
    try:
        return [
            (process.wait(timeout_s), output)
            for process in started
            for output in [process.communicate(timeout=timeout_s)[0]]
        ]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def losses(folder: Path, rank: int) -> dict[int, float]:
    """Step -> loss as a rank noted them; of a step that was repeated after a resume, the last."""
    lines = (folder / f"losses-{rank}.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
