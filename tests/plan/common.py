"""Plans of modules, made in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_pardist.describe import module_tree_profile, profile_model
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.plan import PlanInput, make_plan
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.parallel_plan import ParallelPlan, PrecisionPlan, ShardUnit

BF16_MIXED = PrecisionPlan(name="bf16-mixed", gather_dtype="bfloat16", reduce_dtype="float32")


def plan_of(
    module: nn.Module,
    batch: Any = None,
    *,
    replicate: int = 1,
    shard: int = 4,
    precision: PrecisionPlan | None = None,
    optimizer_bytes: float | None = None,
    training: bool = True,
    **config: Any,
) -> ParallelPlan:
    """The plan of a module on a mesh; without a batch from its tree alone."""
    if batch is None:
        profile = module_tree_profile(module)
    else:
        entry: Any = "training_step" if hasattr(module, "training_step") else "forward"
        profile = profile_model(module, batch, entry=entry)
        assert profile.source == "fake_run", profile.fallback_reason
    given = PlanInput(
        table=module_table(module, profile.called_modules),
        profile=profile,
        config=ParallelConfig(**config),
        sizes=AxisSizes(data_parallel_replicate=replicate, data_parallel_shard=shard),
        precision=precision or PrecisionPlan(name="32-true"),
        training=training,
    )
    return make_plan(given, optimizer_bytes_per_element=optimizer_bytes)


def modules_of(plan: ParallelPlan) -> list[tuple[str, ...]]:
    return [unit.modules for unit in plan.data_parallel.units]


def root_of(plan: ParallelPlan) -> ShardUnit:
    root = plan.data_parallel.units[-1]
    assert root.is_root
    return root


class Tower(nn.Module):
    """A stack of two-layer blocks between two layers; ``forward`` takes rows of width 8."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList([self.block(width) for _ in range(blocks)])
        self.out = nn.Linear(width, 3)

    def block(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def rows(width: int = 8) -> tuple[torch.Tensor]:
    return (torch.zeros(2, width),)
