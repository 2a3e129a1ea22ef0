"""What the launchers of these tests start: a small training that notes its losses (``python -m``, or torchrun -m)."""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pardist import DiagnosisOptions, HybridStrategy
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.strategies.common import Tower, loader

STEPS, ROWS = 8, 8


class Losses(L.Callback):
    """Appends step and loss to a file of this rank, as soon as they are known; may wait before a step."""

    def __init__(self, path: Path, seconds_per_step: float) -> None:
        self.path, self.seconds = path, seconds_per_step

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([trainer.global_step, float(trainer.callback_metrics["train_loss"])]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--one_process", action="store_true")
    parser.add_argument("--stages", type=int, default=1, help="of a pipeline")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--seconds_per_step", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    world_size = options.devices * options.num_nodes
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    strategy = HybridStrategy(
        pipeline_parallel_size=options.stages,
        timeout=timedelta(seconds=options.timeout),
        checkpoint=CheckpointOptions(timeout_s=options.timeout),
        diagnosis=DiagnosisOptions(start_timeout_s=max(options.timeout, 120.0), compare_steps=True),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy="auto" if options.one_process else strategy,
        max_epochs=1,
        callbacks=[
            Losses(options.folder / f"losses-{rank}.jsonl", options.seconds_per_step),
            ModelCheckpoint(options.folder / "checkpoints", every_n_train_steps=1, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # A loader that keeps its position: a run that is cut amid an epoch goes on at the next unseen sample.
    data = StatefulDataLoader(loader(STEPS * ROWS, 1).dataset, batch_size=ROWS * options.stages // world_size)
    trainer.fit(Tower(), data, ckpt_path="last" if options.resume else None)
    print(f"rank {rank} has finished", flush=True)


if __name__ == "__main__":
    main()
