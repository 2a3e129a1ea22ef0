"""A Trainer that trains on two ranks and saves at every step, started again and again while somebody kills its ranks.

The parent imports everything once and forks the ranks with a launcher's environment variables, so that a start takes a
fraction of a second. Nobody watches over the ranks: the one that was not killed must end by itself, as it must on
another machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

RANKS, STEPS, WIDTH = 2, 12, 128
KILL_AFTER_S = 0.1
"""A rank is killed within so many seconds of a random entry of the journal: about what a step with its saves takes.

The moment goes by what the run has done: a clock would miss the run on a quick machine, and its end on a busy one.
"""
DEATH_S = 40.0
"""How long the rank that was not killed may take to notice and end."""


@dataclass
class Outcome:
    """What happened to a run."""

    kills: int = 0
    resumes: int = 0
    attempts: int = 0


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Dropout(0.1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss, on_step=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class Journal(L.Callback):
    """Rank 0 writes down where it began, every loss, and what must be there after a restart."""

    def __init__(self, folder: Path, behind: bool) -> None:
        self.path, self.behind = folder / "log.jsonl", behind

    def note(self, trainer: L.Trainer, entry: dict[str, Any]) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, {"resumed": trainer.global_step})

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        # Saved behind, "last" of the step before may still be on its way.
        self.note(trainer, {"published": trainer.global_step - self.behind})

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(trainer, {"step": trainer.global_step, "loss": float(trainer.callback_metrics["loss"])})


def rank_program(folder: Path, behind: bool) -> None:
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    options = CheckpointOptions(async_save=behind, timeout_s=10)
    keep = ModelCheckpoint(
        folder / "checkpoints", "{step}", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=1,
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, max_epochs=STEPS // 3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Journal(folder, behind), keep], log_every_n_steps=1,
        strategy=HybridStrategy(zero_stage=3, print_plan=False, checkpoint=options),
    )  # fmt: skip
    data = TensorDataset(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0)))
    trainer.fit(Model(), make_loader(data), ckpt_path="last")


def make_loader(data: TensorDataset) -> DataLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(data, batch_size=4, shuffle=True)


def start_ranks(folder: Path, behind: bool) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                names = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "NODE_RANK": 0,
                    "WORLD_SIZE": RANKS,
                    "LOCAL_WORLD_SIZE": RANKS,
                }
                os.environ.update({name: str(value) for name, value in names.items()})
                os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
                rank_program(folder, behind)
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
        pid, status = os.waitpid(child, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, status = os.waitpid(child, os.WNOHANG)
        if not pid:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        statuses.append(status if pid else None)
    return statuses


def attempt(folder: Path, behind: bool, chance: random.Random | None) -> tuple[bool, bool]:
    """Starts the ranks once; kills one at a random moment if ``chance`` is given.

    Returns:
        Whether the run came to its end, and whether a rank was killed before that.
    """
    before = journal(folder)
    children = start_ranks(folder, behind)
    deadline = time.monotonic() + 120
    if chance is not None:
        left = STEPS - max((entry["step"] for entry in before if "step" in entry), default=0)
        # Two entries a step, and one for the start.
        wanted = len(before) + chance.randint(1, max(2 * left, 1))
        while len(journal(folder)) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, KILL_AFTER_S))
        os.kill(chance.choice(children), signal.SIGKILL)
    statuses = wait_for(children, DEATH_S if chance is not None else 120.0)
    if None in statuses:
        raise AssertionError(f"a rank hung: {statuses}\n{outputs(folder)}")
    return all(status == 0 for status in statuses), signal.SIGKILL in statuses


def journal(folder: Path) -> list[dict[str, Any]]:
    """Returns what rank 0 has written down so far; a line that it is just writing is left out."""
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def outputs(folder: Path) -> str:
    paths = sorted(folder.glob("output-*.txt"))
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)


def losses_of_one_run(folder: Path) -> dict[int, float]:
    """Returns the losses of a run that nobody interrupts, by step."""
    folder.mkdir(parents=True)
    through, _ = attempt(folder, behind=False, chance=None)
    if not through:
        raise AssertionError(outputs(folder))
    return {entry["step"]: entry["loss"] for entry in journal(folder) if "step" in entry}


def killed_until_through(
    folder: Path, expected: dict[int, float], chance: random.Random, kills: int, *, behind: bool
) -> Outcome:
    """Kills a run up to ``kills`` times and lets it end; every loss must be the uninterrupted run's.

    Raises:
        AssertionError: if a rank hangs, a loss differs, or a checkpoint is lost that was published.
    """
    folder.mkdir(parents=True)
    outcome, through = Outcome(), False
    while not through:
        through, killed = attempt(folder, behind, chance if outcome.kills < kills else None)
        outcome.kills += killed
        outcome.attempts += 1
        if not (through or killed) or outcome.attempts > 3 * kills + 5:
            raise AssertionError(outputs(folder))
    outcome.resumes = _check(folder, expected)
    leftovers = [name for name in os.listdir(folder / "checkpoints") if ".tmp-" in name or ".old-" in name]
    if leftovers:
        raise AssertionError(f"left behind: {leftovers}")
    return outcome


def _check(folder: Path, expected: dict[int, float]) -> int:
    published = resumes = last = 0
    for entry in journal(folder):
        if "step" in entry:
            last, reference = entry["step"], expected[entry["step"]]
            if abs(entry["loss"] - reference) > 1e-6 * abs(reference):
                raise AssertionError(f"{folder}: {entry} instead of {reference}")
        elif "published" in entry:
            published = max(published, entry["published"])
        else:
            if entry["resumed"] < published:
                raise AssertionError(f"{folder}: {entry} after {published} was published\n{outputs(folder)}")
            resumes += entry["resumed"] > 0
    if last != STEPS:
        raise AssertionError(f"{folder}: ended at step {last}")
    return resumes
