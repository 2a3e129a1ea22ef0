"""Modules that recompute or compile their blocks: reentrant checkpoints work, compiled blocks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.specs.pipeline_options import PipelineOptions
from tests.bad_input.common import check
from tests.pipeline.test_steps import merge
from tests.strategies.common import Block, Tower, loader, make_trainer, weights

TWO: dict[str, Any] = {"pipeline_parallel_size": 2}


class Recomputing(Tower):
    """Every block recomputes its half, or the module whole blocks, or both; the embedding may be frozen."""

    def __init__(self, where: str, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HalfRecomputed(where != "around") for _ in range(5)])
        self.where = where
        if frozen:  # then the reentrant kind gives the first block no gradient, and says so
            self.inp.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.where == "inside" else checkpoint(block, x, use_reentrant=True)
        return self.out(x).squeeze(-1)


class HalfRecomputed(Block):
    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self.is_on = is_on
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if not self.is_on:
            return super().forward(x)
        return x + checkpoint(self._half, x, use_reentrant=True)

    def _half(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def train(
    where: str, frozen: bool, schedules: tuple[str, ...], world_size: int
) -> list[tuple[dict[str, Tensor], list[int]]]:
    found = []
    for schedule in schedules:
        torch.manual_seed(0)
        options = PipelineOptions(schedule=schedule, num_microbatches=4) if schedule else None
        layout = {**TWO, "pipeline": options} if schedule else None
        module = Recomputing(where, frozen)
        trainer = make_trainer(layout, world_size, max_steps=3, num_sanity_val_steps=0, gradient_clip_val=0.1)
        for block in module.blocks:
            block.runs = 0
        trainer.fit(module, loader(24, 8))
        found.append((weights(module), [block.runs for block in module.blocks]))
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("where", "frozen"), [("inside", False), ("around", False), ("both", True)])
def test_reentrant_checkpoints_equal_one_process(
    run_distributed: Any, run_single: Any, where: str, frozen: bool
) -> None:
    ((want, runs),) = run_single(train, where, frozen, ("",), 1)
    schedules = ("1f1b", "interleaved_zero_bubble")
    results = run_distributed(train, where, frozen, schedules, 2, world_size=2)
    for per_rank in zip(*results, strict=True):
        for name, value in merge([held for held, _ in per_rank]).items():
            torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6, msg=f"{name}")
        # Four micro-batches; a zero-bubble schedule must not recompute once for each half of a backward pass.
        assert [sum(counts) for counts in zip(*(found for _, found in per_rank), strict=True)] == [4 * n for n in runs]


class Compiled(Tower):
    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "block":
            self.blocks[1].compile(backend="eager")
        if how == "wrapped":
            self.blocks[1] = torch.compile(self.blocks[1], backend="eager")
        self.body = Body(self.blocks) if how in ("around", "around, wrapped") else None
        if how == "around":
            self.body.compile(backend="eager")
        if how == "around, wrapped":
            self.body = torch.compile(self.body, backend="eager")
        if how == "inside":
            for block in self.blocks:
                block.up.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        if self.body is None:
            return super().forward(x)
        return self.out(self.body(self.inp(x))).squeeze(-1)


class Body(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.layers = blocks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fit(how: str, layout: dict[str, Any] | None = TWO, world_size: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Compiled(how)
    make_trainer(layout, world_size, max_steps=2, num_sanity_val_steps=0).fit(module, loader(16, 8))
    return weights(module)


@pytest.mark.filterwarnings("ignore:.*could not be run on fake tensors")
def test_compiled_blocks_are_refused(run_distributed: Any, run_single: Any) -> None:
    cases = {"block": r"blocks\.1 was compiled", "wrapped": r"blocks\.1 was compiled", "around": "body was compiled",
             "around, wrapped": "body was compiled"}  # fmt: skip
    check(run_distributed, [(fit, (how,), pattern) for how, pattern in cases.items()])


def test_what_is_inside_of_blocks_may_be_compiled(run_distributed: Any, run_single: Any) -> None:
    want = run_single(fit, "inside", None, 1)
    for name, value in merge(run_distributed(fit, "inside", world_size=2)).items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)
