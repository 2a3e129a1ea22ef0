"""bf16-mixed in a pipeline is no less exact than without one: both are held against the same run in fp32.

Without sharding the measure is one process; with it, sharding alone, for fully_shard gathers weights in bf16 and also
computes norms in it, which autocast does not. A pipeline adds no rounding of its own: what crosses a cut has the dtype
it has anyway, and the gradients of micro-batches are summed in fp32.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_pardist.specs.pipeline_options import PipelineOptions
from tests.pipeline.modules import DeepGPT
from tests.strategies.common import make_trainer, whole

BATCHES, ACCUMULATE, ROWS = 6, 3, 8
MOST = 1.25
"""Error of a pipeline over the error without one, of which 1.00 and 0.99 were measured."""
ROUNDING = 2.0**-9
"""Of a bf16 number, relative: what the loss, a mean over many logits, stays below."""
SHARDED = {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 1}


class Notes(L.Callback):
    """Gradients of the first step, before clipping, and the loss of every step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not self.gradients:
            held = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
            self.gradients = {name: whole(gradient) for name, gradient in held.items()}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))


def train(precision: str, layout: dict[str, Any] | None, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    notes, module = Notes(), DeepGPT()
    trainer = make_trainer(
        layout,
        world_size,
        precision=precision,
        callbacks=[notes],
        max_steps=BATCHES // ACCUMULATE,
        accumulate_grad_batches=ACCUMULATE,
        limit_val_batches=0,
    )
    pipelines = world_size // (layout or {}).get("pipeline_parallel_size", 1)
    data = torch.utils.data.DataLoader(module.dataset(BATCHES * ROWS, seed=5), batch_size=ROWS // pipelines)
    trainer.fit(module, data)
    return notes.gradients, notes.losses


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Root mean square over parameters of the error relative to each parameter's gradient."""
    return float(torch.stack([((got[n].float() - want[n]).norm() / want[n].norm()) ** 2 for n in got]).mean().sqrt())


def both(layout: dict[str, Any], world_size: int) -> list[Any]:
    """Two schedules: one whose backward passes call the hooks of sharded modules, and one whose do not."""
    made = []
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        options = PipelineOptions(schedule=schedule)
        made.append(train("bf16-mixed", {**layout, "pipeline_parallel_size": 2, "pipeline": options}, world_size))
    return made


def test_bf16_mixed_is_as_exact_as_without_a_pipeline(run_distributed: Any, run_single: Any) -> None:
    truth, true_losses = run_single(train, "32-true", None, 1)
    alone, _ = run_single(train, "bf16-mixed", None, 1)
    sharded, _ = run_distributed(train, "bf16-mixed", SHARDED, 2, world_size=2)[0]
    for layout, world_size, without in (({}, 2, alone), ({**SHARDED, "zero_stage": 1}, 4, sharded)):
        results = run_distributed(both, layout, world_size, world_size=world_size)
        for runs in zip(*results, strict=True):
            merged = {name: gradient for gradients, _ in runs for name, gradient in gradients.items()}
            assert merged.keys() == truth.keys()
            assert distance(merged, truth) < MOST * distance(without, truth)
            for _, losses in runs:
                assert losses == runs[0][1]
                assert losses == pytest.approx(true_losses, rel=ROUNDING)
