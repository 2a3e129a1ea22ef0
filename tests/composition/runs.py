"""Trains, evaluates, saves and resumes the headline module on a layout, and notes every number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pardist import HybridStrategy
from tests.composition.headline import Headline, Texts
from tests.parity.runs import Record, Recorder

GLOBAL_BATCH = 8
TRAIN_ROWS, EVALUATED_ROWS = 32, 16
Layout = dict[str, Any]


@dataclass
class Story:
    """What one run from the first step to the predictions must show."""

    fit: Record
    evaluated: dict[str, float] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    checkpoint: str = ""


def loader(rows: int, seed: int, layout: Layout | None) -> DataLoader[Any]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    peers = [(layout or {}).get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor")]
    return DataLoader(Texts(rows, seed), batch_size=GLOBAL_BATCH // (world_size // math.prod(peers)))


def trainer_for(layout: Layout | None, **options: Any) -> L.Trainer:
    strategy: Any = "auto"
    if layout is not None:
        strategy = HybridStrategy(print_plan=False, gather_predictions=True, **layout)
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        gradient_clip_val=0.5,
        **{"num_sanity_val_steps": 1, "max_epochs": 1, "accumulate_grad_batches": 2, **options},
    )


def fresh_module() -> Headline:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # rank 0's weights must win
    return Headline()


def story(layout: Layout | None, folder: str, precision: Any = "32-true") -> Story:
    """Fits an epoch with validation and checkpoints, then validates, tests and predicts with the best one."""
    module, recorder = fresh_module(), Recorder()
    keep = ModelCheckpoint(folder, "best", monitor="val_loss", save_last=True, enable_version_counter=False)
    trainer = trainer_for(layout, callbacks=[recorder, keep], precision=precision)
    trainer.fit(module, loader(TRAIN_ROWS, 5, layout), loader(EVALUATED_ROWS, 7, layout))
    result = Story(recorder.record, checkpoint=keep.best_model_path)
    result.evaluated |= trainer.validate(module, loader(EVALUATED_ROWS, 7, layout), ckpt_path="best", verbose=False)[0]
    result.evaluated |= trainer.test(module, loader(EVALUATED_ROWS, 8, layout), ckpt_path="best", verbose=False)[0]
    for batch in trainer.predict(module, loader(EVALUATED_ROWS, 9, layout), ckpt_path="best") or []:
        assert isinstance(batch, dict)
        result.names += batch["names"]
        result.logits.append(batch["logits"].float())
    return result


def resumed(layout: Layout | None, path: str, max_epochs: int = 2) -> Record:
    """Goes on from a checkpoint with a module of other weights."""
    torch.manual_seed(99)
    recorder = Recorder()
    options: dict[str, Any] = {"enable_checkpointing": False, "num_sanity_val_steps": 0}  # ``story`` has them
    trainer = trainer_for(layout, callbacks=[recorder], max_epochs=max_epochs, **options)
    trainer.fit(Headline(), loader(TRAIN_ROWS, 5, layout), loader(EVALUATED_ROWS, 7, layout), ckpt_path=path)
    return recorder.record


def stories(cases: list[tuple[Layout, str, Any]]) -> list[Story]:
    return [story(*case) for case in cases]


def all_resumed(cases: list[tuple[Layout, str]]) -> list[Record]:
    return [resumed(*case) for case in cases]
