"""Meshes of hundreds of ranks, and plans carried out on them, under a process group that sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_pardist.apply import apply_plan
from lightning_pardist.mesh import Meshes, build_meshes
from lightning_pardist.run.step import StepRunner
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.parallel_plan import ParallelPlan
from tests.plan.common import Tower, plan_of, rows


def meshes_of(sizes: AxisSizes, rank: int) -> Meshes:
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    return build_meshes(sizes, "cpu")


def places(rank: int) -> dict[str, Any]:
    meshes = meshes_of(ParallelConfig().resolve(world_size=512, num_nodes=64), rank)
    return {
        "sizes": meshes.sizes,
        "data": (meshes.data_parallel_rank, meshes.data_parallel_size),
        "joint": meshes.world["data_parallel"].size(),
        "sharding": (meshes.sharding().mesh_dim_names, tuple(meshes.sharding().shape)),
        "shard": meshes.world["data_parallel_shard"].get_local_rank(),
        "shard_peers": dist.get_process_group_ranks(meshes.world["data_parallel_shard"].get_group()),
        "replicate_peers": dist.get_process_group_ranks(meshes.world["data_parallel_replicate"].get_group()),
    }


@pytest.mark.parametrize("rank", [0, 13, 511])
def test_512_ranks_on_64_nodes(run_single: Any, rank: int) -> None:
    found = run_single(places, rank)
    assert found["sizes"] == AxisSizes(data_parallel_replicate=64, data_parallel_shard=8)
    assert found["data"] == (rank, 512)
    assert found["joint"] == 512
    assert found["sharding"] == (("data_parallel_replicate", "data_parallel_shard"), (64, 8))
    assert found["shard"] == rank % 8
    node = rank // 8
    assert found["shard_peers"] == list(range(8 * node, 8 * node + 8))  # all on one node
    assert found["replicate_peers"] == list(range(rank % 8, 512, 8))


def one_dimensional() -> tuple[str, ...]:
    return tuple(meshes_of(AxisSizes(data_parallel_shard=16), 3).sharding().mesh_dim_names or ())


def test_without_replicas_the_mesh_of_shards_has_one_axis(run_single: Any) -> None:
    assert run_single(one_dimensional) == ("data_parallel_shard",)


def counted(replicate: int, shard: int, stage: int) -> tuple[dict[str, int], ParallelPlan, int, int]:
    """One training step of a tower on fake ranks: collectives by kind, the plan, elements held, elements of all."""
    module = Tower(blocks=5, width=8)
    total = sum(p.numel() for p in module.parameters())
    plan = plan_of(module, rows(), replicate=replicate, shard=shard, zero_stage=stage)
    meshes = meshes_of(plan.sizes, rank=0)
    runner = StepRunner(apply_plan(module, plan, meshes, torch.device("cpu")))
    runner.forward(lambda: module(*rows()).sum()).backward()  # torch's lazy start is over
    for parameter in module.parameters():
        parameter.grad = None
    with CommDebugMode() as counter:
        loss = runner.forward(lambda: module(*rows()).sum())
        runner.loss_to_backward(loss).backward()
        runner.after_backward()
    names = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for operator, count in counter.get_comm_counts().items():
        for name in names:
            if name.replace("_", "") in str(operator).replace("_", ""):
                names[name] += count
    held = sum(p.to_local().numel() for p in module.parameters())  # type: ignore[operator]
    return names, plan, held, total


@pytest.mark.parametrize(("replicate", "shard", "stage"), [(1, 64, 3), (1, 64, 2), (8, 8, 3), (64, 2, 2)])
def test_a_step_costs_what_the_plan_says(run_single: Any, replicate: int, shard: int, stage: int) -> None:
    counts, plan, held, _ = run_single(counted, replicate, shard, stage)
    planned = {t.collective: t.count for t in plan.traffic}
    assert planned["all_gather"] == (2 * 5 + 1 if stage == 3 else 5 + 1)
    assert planned["reduce_scatter"] == 5 + 1
    assert counts == {"all_reduce": 0, **planned}
    assert 4 * held == plan.state_per_rank.parameters  # rank 0 holds most
