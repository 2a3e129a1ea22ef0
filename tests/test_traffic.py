"""The exact figures: collectives of real steps and bytes of live state, against the plan and against formulas by hand.

With N blocks and a root, d shards, k micro-batches per optimizer step, B and R the padded elements of all blocks and of
the root (dim 0 of every parameter rounded up to a multiple of d):

| layout | all-gathers (elements) | reduce-scatters (elements) | all-reduces (elements) |
| --- | --- | --- | --- |
| ZeRO-3 | k (2N + 1)  (k (2B + R)) | k (N + 1)  (k (B + R)) | |
| ZeRO-2 | k (N + 1)  (k (B + R)) | k (N + 1)  (k (B + R)) | |
| ZeRO-1 | N + 1  (B + R) | N + 1  (B + R) | |
| hybrid | as ZeRO-3 | as ZeRO-3 | N + 1  ((B + R) / d) over the copies |
| ddp | | | buckets, once per window (parameters) |
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.state import LiveState, live_state
from benchmarks.support.traffic import (
    Collective,
    CollectiveRecorder,
    Traffic,
    axis_ranks,
    control_messages,
    planned,
    totals,
)
from lightning_pardist import HybridStrategy
from lightning_pardist.plan import state_bytes

BLOCKS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "zero1": {"zero_stage": 1, "data_parallel_replicate_size": 1},
    "zero2": {"zero_stage": 2, "data_parallel_replicate_size": 1},
    "fsdp": {"zero_stage": 3, "data_parallel_replicate_size": 1},
    "hybrid": {"zero_stage": 3, "data_parallel_replicate_size": 2},
}


class Block(nn.Module):
    """7 and 5 rows: no parameter but the gain of 6 is cut evenly, and over 4 ranks that neither."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.gain = nn.Parameter(torch.ones(1, 6))  # one row: only the first rank holds any of it

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.gain


class Odd(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass
class Seen:
    """What one rank saw."""

    windows: list[list[Collective]]
    """Collectives of every optimizer step from the third on."""
    planned: Traffic
    state: LiveState
    planned_state: int
    shard: tuple[int, ...]
    copies: tuple[int, ...]
    everyone: tuple[int, ...]


class _Watch(L.Callback):
    def __init__(self, accumulate: int, batches: int) -> None:
        self._accumulate, self._last = accumulate, batches - 1
        self._recorder: CollectiveRecorder | None = None
        self.windows: list[list[Collective]] = []
        self.state: LiveState | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        # DistributedDataParallel finds its buckets in the first window and tells all ranks in the second.
        if index >= 2 * self._accumulate and index % self._accumulate == 0:
            self._recorder = CollectiveRecorder()
            self._recorder.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if (index + 1) % self._accumulate and index != self._last:
            return
        self.state = live_state(module, trainer.optimizers)
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self.windows.append(self._recorder.collectives)


def watch(layout: str, accumulate: int, clip: float | None, precision: Any) -> Seen:
    """Trains three whole windows and a last one that is a batch shorter."""
    world_size = dist.get_world_size()
    batches = 4 * accumulate - (accumulate > 1)
    x = torch.randn(2 * world_size * batches, 5, generator=torch.Generator().manual_seed(0))
    callback = _Watch(accumulate, batches)
    strategy = HybridStrategy(print_plan=False, **LAYOUTS[layout])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Odd(), DataLoader(TensorDataset(x, x.sum(-1)), batch_size=2))
    model, meshes = strategy.parallel_model, strategy.meshes
    assert model is not None and model.profile is not None and meshes is not None and callback.state is not None
    state = state_bytes(model.profile, 1 if layout == "ddp" else meshes.sizes.data_parallel_shard, 8)
    return Seen(
        windows=callback.windows,
        planned=planned(model.plan, meshes),
        state=callback.state,
        planned_state=state.parameters + state.gradients + (state.optimizer or 0),
        shard=axis_ranks(meshes, "data_parallel_shard"),
        copies=axis_ranks(meshes, "data_parallel_replicate"),
        everyone=axis_ranks(meshes, "data_parallel"),
    )


def padded(module: nn.Module, shards: int) -> int:
    """Elements after dim 0 of every parameter is rounded up to a multiple of the shards."""
    return sum(math.ceil(p.shape[0] / shards) * shards * math.prod(p.shape[1:]) for p in module.parameters())


def by_hand(layout: str, seen: Seen, micro_batches: int, gather_bytes: int = 4) -> Traffic:
    """The table at the top of this file."""
    module = Odd()
    if layout == "ddp":
        return {("all_reduce", seen.everyone): (1, 4 * sum(p.numel() for p in module.parameters()))}
    d = len(seen.shard)
    blocks, root = padded(module.blocks, d), padded(module.inp, d) + padded(module.out, d)
    often = 1 if layout == "zero1" else micro_batches
    gathers, gathered = BLOCKS + 1, blocks + root
    if layout in ("fsdp", "hybrid"):
        gathers, gathered = 2 * BLOCKS + 1, 2 * blocks + root
    found = {
        ("all_gather", seen.shard): (often * gathers, often * gathered * gather_bytes),
        ("reduce_scatter", seen.shard): (often * (BLOCKS + 1), often * (blocks + root) * 4),
    }
    if layout == "hybrid":
        found["all_reduce", seen.copies] = (BLOCKS + 1, (blocks + root) // d * 4)
    return found


@pytest.fixture(scope="module")
def watched(run_distributed):
    """Each kind of run once: ``watched(layout, micro-batches per step)``. Runs without accumulation clip by norm."""

    @functools.cache
    def run(layout: str, accumulate: int) -> list[Seen]:
        return run_distributed(watch, layout, accumulate, 0.1 if accumulate == 1 else None, "32-true", world_size=4)

    return run


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_one_step_moves_what_the_plan_says(watched, layout):
    for seen in watched(layout, 1):
        for window in seen.windows:
            assert totals(window, "data") == seen.planned == by_hand(layout, seen, 1)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_accumulation_reduces_as_often_as_stated(watched, layout):
    for seen in watched(layout, 4):
        whole, partial = seen.windows
        assert totals(whole, "data") == by_hand(layout, seen, 4)
        assert totals(partial, "data") == by_hand(layout, seen, 3)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_clipping_costs_one_number_over_the_shards(watched, layout):
    for seen in watched(layout, 1):
        for window in seen.windows:
            assert totals(window, "clip") == ({} if layout == "ddp" else {("all_reduce", seen.shard): (1, 4)})


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_state_is_sixteen_bytes_per_parameter_over_shards(watched, layout):
    everyone = watched(layout, 1)
    module = Odd()
    elements = sum(p.numel() for p in module.parameters())
    d = 1 if layout == "ddp" else len(everyone[0].shard)
    share = padded(module, d) // d
    assert max(seen.state.total for seen in everyone) == everyone[0].planned_state == 16 * share
    assert sum(seen.state.optimizer for seen in everyone) == 8 * elements * 4 // d
    for seen in everyone:
        assert (seen.state.parameters, seen.state.gradients, seen.state.gathered) == (4 * share, 4 * share, 0)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_step_costs_two_small_messages_besides(watched, layout):
    """One agreement of five numbers (loss missing, bad, SIGTERM, logged names twice), one sum of what was logged."""
    for seen in watched(layout, 1):
        for window in seen.windows:
            assert control_messages(window) == {
                "all_reduce by lightning_pardist.run.agree": (1, 40),
                "all_reduce by lightning_pardist.strategies.metrics": (1, 16),
            }


def test_bf16_mixed_gathers_half_and_reduces_whole(run_distributed):
    for seen in run_distributed(watch, "fsdp", 1, None, "bf16-mixed", world_size=2):
        for window in seen.windows:
            assert totals(window, "data") == seen.planned == by_hand("fsdp", seen, 1, gather_bytes=2)
