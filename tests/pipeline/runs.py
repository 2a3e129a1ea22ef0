"""Trains a module as a pipeline and notes everything that must not depend on the layout, as ``tests.parity`` does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.strategies.hybrid import HybridStrategy
from tests.parity.runs import GLOBAL_BATCH, Record, Recorder
from tests.pipeline.modules import MODULES

TRAIN_ROWS, VALID_ROWS = 38, 11  # five batches an epoch, the last one ragged


def strategy(arguments: dict[str, Any] | None) -> Any:
    if arguments is None:
        return "auto"
    options = {key: arguments[key] for key in arguments if key in PipelineOptions.__dataclass_fields__}
    others = {key: arguments[key] for key in arguments if key not in options}
    pipeline = PipelineOptions(**options) if arguments.get("pipeline_parallel_size", 1) != 1 else None
    return HybridStrategy(print_plan=False, pipeline=pipeline, **others)


def train(name: str, arguments: dict[str, Any] | None, options: dict[str, Any] | None = None) -> Record:
    """One epoch and a part of five and three batches, with a validation in the middle of each."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(rank)  # other ranks start from other weights: rank 0's must win
    make: Callable[[], Any] = MODULES[name]
    module, recorder = make(), Recorder()
    trainer = L.Trainer(
        strategy=strategy(arguments),
        accelerator="cpu",
        devices=world_size,
        max_steps=3 if (options or {}).get("accumulate_grad_batches") else 7,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        val_check_interval=3,
        **(options or {}),
    )
    copies = [(arguments or {}).get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor")]
    rows = GLOBAL_BATCH // (world_size // math.prod(copies))
    collate = getattr(module, "collate", None)
    training = DataLoader(module.dataset(TRAIN_ROWS, seed=5), batch_size=rows, collate_fn=collate)
    validation = DataLoader(module.dataset(VALID_ROWS, seed=7), batch_size=rows, collate_fn=collate)
    has_validation = type(module).validation_step is not L.LightningModule.validation_step
    trainer.fit(module, training, validation if has_validation else None)
    return recorder.record


def train_all(cases: Sequence[tuple[Any, ...]]) -> list[Record]:
    """Several runs in one call."""
    return [train(*case) for case in cases]
