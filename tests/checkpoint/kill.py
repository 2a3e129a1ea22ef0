"""Trains on two ranks with a save at every step, while somebody kills a rank; starts again until it is through.

The parent imports everything once and forks the ranks, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_pardist.checkpoint import SaveInfo, Saver, TrainState, load_checkpoint, newest_complete
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

RANKS, STEPS = 2, 12
DEATH_S = 40.0
"""How long the ranks that were not killed may take to notice."""


def rank_program(rank: int, folder: Path, attempt: int, behind: bool) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous-{attempt}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    group = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    saver = Saver(CheckpointOptions(async_save=behind, timeout_s=DEATH_S / 2), group)
    start = 0
    path = newest_complete(str(folder / "checkpoints"), control_group=group)
    if path is not None:
        report = load_checkpoint(path, TrainState(module, [optimizer]), control_group=group)
        start = report.trainer["step"]
    note(folder, rank, {"attempt": attempt, "resumed": start})
    for step in range(start, STEPS):
        data = torch.rand(4, 256, generator=torch.Generator().manual_seed(step))
        loss = module(data.chunk(RANKS)[rank]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, rank, {"step": step, "loss": float(loss.detach())})
        saver.wait()
        note(folder, rank, {"published": step})  # what was saved in the step before
        name = "last" if step % 2 else f"step-{step}"  # one name is used again and again
        state = TrainState(module, [optimizer], {"step": step + 1})
        saver.save(str(folder / "checkpoints" / name), state, SaveInfo(step + 1))
    saver.close()
    dist.destroy_process_group()


def note(folder: Path, rank: int, entry: dict[str, Any]) -> None:
    if rank == 0:
        with open(folder / "log.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")


def start_ranks(folder: Path, attempt: int, behind: bool) -> list[int]:
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                rank_program(rank, folder, attempt, behind)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    return children


def wait_for(children: list[int], limit_s: float) -> list[int | None]:
    """Returns the exit statuses; None for one that did not end in time, which is killed."""
    statuses: list[int | None] = []
    deadline = time.monotonic() + limit_s
    for child in children:
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        statuses.append(status if pid else None)
    return statuses


def attempt_run(folder: Path, attempt: int, behind: bool, chance: random.Random | None) -> bool:
    """Returns whether the run came to its end; kills a rank at a random moment if ``chance`` is given."""
    log = folder / "log.jsonl"
    before = log.stat().st_size if log.exists() else 0
    children = start_ranks(folder, attempt, behind)
    if chance is not None:
        while not (log.exists() and log.stat().st_size > before):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.5))
        os.kill(chance.choice(children), signal.SIGKILL)
    statuses = wait_for(children, DEATH_S if chance is not None else 120.0)
    assert None not in statuses, f"a rank hung: {statuses}\n{outputs(folder)}"
    return all(status == 0 for status in statuses)


def outputs(folder: Path) -> str:
    return "\n".join(f"--- rank {rank}\n{(folder / f'output-{rank}.txt').read_text()[-3000:]}" for rank in range(RANKS))


def check(folder: Path, expected: dict[int, float], attempt: int) -> int:
    """Every loss of every attempt is the uninterrupted run's; a restart loses nothing that was published."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    published = 0
    for entry in entries:
        if "step" in entry:
            reference = expected[entry["step"]]
            assert abs(entry["loss"] - reference) <= 1e-6 * abs(reference), entry
        elif "published" in entry:
            published = max(published, entry["published"])
        else:
            assert entry["resumed"] >= published, f"attempt {attempt}: {entry} after {published} was published"
    return sum("resumed" in entry and entry["resumed"] > 0 for entry in entries)


def main(root: Path, kills: int, seed: int) -> dict[str, Any]:
    reference = root / "reference"
    reference.mkdir(parents=True)
    assert attempt_run(reference, 0, behind=False, chance=None), outputs(reference)
    lines = [json.loads(line) for line in (reference / "log.jsonl").read_text().splitlines()]
    expected = {entry["step"]: entry["loss"] for entry in lines if "step" in entry}
    chance, done = random.Random(seed), {"kills": 0, "runs": 0, "resumes": 0}
    while done["kills"] < kills:
        folder = root / f"run-{done['runs']}"
        folder.mkdir()
        attempt, through = 0, False
        while not through:
            killing = done["kills"] < kills
            through = attempt_run(folder, attempt, attempt % 2 == 0, chance if killing else None)
            done["kills"] += killing
            attempt += 1
            assert attempt < 40, outputs(folder)
        done["resumes"] += check(folder, expected, attempt)
        leftovers = [name for name in os.listdir(folder / "checkpoints") if ".tmp-" in name or ".old-" in name]
        assert leftovers == [], leftovers
        done["runs"] += 1
    return done


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
