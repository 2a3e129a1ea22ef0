"""A plan applied to the meta device: hooks and shards of 512 ranks in one process, without memory for weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_pardist.apply import apply_plan
from lightning_pardist.describe import profile_model
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.mesh import build_meshes
from lightning_pardist.plan import PlanInput, make_plan
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.parallel_plan import PrecisionPlan


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1 << 14, 1 << 14) for _ in range(4))  # 4 GiB, were they real
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).sum()


def spread_on_meta() -> tuple[int, set[str], list[tuple[int, ...]]]:
    dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
    with torch.device("meta"):
        module = Tower()
    profile = profile_model(module, torch.zeros(2, 1 << 14), entry="forward")
    config = ParallelConfig(data_parallel_replicate_size=64, data_parallel_shard_size=8)
    sizes = config.resolve(world_size=512, num_nodes=64)
    given = PlanInput(
        table=module_table(module, profile.called_modules),
        profile=profile,
        config=config,
        sizes=sizes,
        precision=PrecisionPlan(name="32-true"),
        training=True,
    )
    apply_plan(module, make_plan(given), build_meshes(sizes, "cpu"), torch.device("meta"))
    units = sum(isinstance(child, FSDPModule) for child in module.modules())
    shards = [p for p in module.parameters() if isinstance(p, DTensor)]
    assert len(shards) == len(list(module.parameters()))
    return units, {p.to_local().device.type for p in shards}, [tuple(p.to_local().shape) for p in shards]


def test_meta_weights_are_cut_but_never_made(run_distributed):
    ((units, devices, shapes),) = run_distributed(spread_on_meta, world_size=1, process_group=False)
    assert units == 5
    assert devices == {"meta"}
    assert shapes[1:3] == [(2048, 16384), (2048,)]
