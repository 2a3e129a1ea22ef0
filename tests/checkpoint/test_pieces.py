"""Boxes of a whole tensor: every layout that torch can make is described exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_pardist.checkpoint import LoadRequest, load_checkpoint, save_checkpoint
from lightning_pardist.checkpoint.pieces import entry_of
from lightning_pardist.checkpoint.plan import Planner
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs

PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "twice": [Shard(0), Shard(0)],
    "fsdp of tensor parallel": [_StridedShard(0, split_factor=2), Shard(0)],
    "fused projection": [Replicate(), _StridedShard(0, split_factor=3)],
    "fused projection, sharded on": [Shard(0), _StridedShard(0, split_factor=3)],
}


@pytest.fixture
def ranks() -> Iterator[Any]:
    def every() -> Iterator[int]:
        for rank in range(4):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
            yield rank
            dist.destroy_process_group()

    yield every
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (3, 2), (1, 1), (0, 4)])
def test_boxes_cover_the_tensor(ranks: Any, placements: str, shape: tuple[int, int]) -> None:
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    rebuilt = torch.full(shape, -1)
    holdings = []
    for _ in ranks():
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = distribute_tensor(whole, mesh, PLACEMENTS[placements], src_data_rank=None)
        entry = entry_of("x", tensor)
        for piece in entry.pieces:
            box = rebuilt
            for dim, (start, length) in enumerate(zip(piece.offset, piece.view.shape)):
                box = box.narrow(dim, start, length)
            box.copy_(piece.view)
        holdings.append(Planner().holding([entry]))
    assert torch.equal(whole, rebuilt)
    plan, _ = Planner().plan(holdings)  # each element has exactly one writer
    assert set(plan.sizes) == {"x"}


def test_a_pending_sum_is_refused(ranks: Any) -> None:
    for _ in ranks():
        mesh = init_device_mesh("cpu", (4,))
        with pytest.raises(ValueError, match=r"x with placements .*Partial"):
            entry_of("x", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        break


def test_a_missing_part_is_refused(ranks: Any) -> None:
    holdings = []
    for rank in ranks():
        mesh = init_device_mesh("cpu", (4,))
        tensor = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
        if rank != 2:
            holdings.append(Planner().holding([entry_of("x", tensor)]))
    with pytest.raises(ValueError, match=r"x of shape \(8,\) has 8 elements, the ranks' boxes 6"):
        Planner().plan(holdings)


class Fused(nn.Module):
    """Parameters as tensor parallelism lays them out, with optimizer state made by real steps."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        mesh = init_device_mesh("cpu", (2, 2)) if spread else None
        for number, (name, placements) in enumerate(PLACEMENTS.items()):
            tensor = torch.randn(12, 6)
            if mesh is not None:
                tensor = distribute_tensor(tensor, mesh, placements)
            self.register_parameter(f"p{number}", nn.Parameter(tensor))
            assert name


def tensor_parallel(folder: str, action: str, spread: bool) -> dict[str, Any]:
    module, group = Fused(spread), runs.control()
    run = runs.Run(module, module, [torch.optim.Adam(module.parameters(), lr=0.1)])
    options = CheckpointOptions(timeout_s=120)
    if action == "save":
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.optimizers[0].step()
        for kind in ("sharded", "full"):
            path = f"{folder}/{spread}-{kind}"
            save_checkpoint(
                path, run.state(), options=CheckpointOptions(format=kind, timeout_s=120), control_group=group
            )
    else:
        load_checkpoint(f"{folder}/{action}", run.state(), options=options, control_group=group)
    state = run.optimizers[0].state
    averages = {f"exp_avg {n}": runs.whole(state[p]["exp_avg"]) for n, p in module.named_parameters()}
    return {**runs.weights(module), **averages}


def test_tensor_parallel_layouts(run_distributed: Any, run_single: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    spread = run_distributed(tensor_parallel, folder, "save", True, world_size=4)[0]
    single = run_single(tensor_parallel, folder, "save", False)
    assert runs.same(single, spread) == []
    for kind in ("sharded", "full"):
        assert runs.same(single, run_single(tensor_parallel, folder, f"True-{kind}", False)) == []
        assert runs.same(single, run_distributed(tensor_parallel, folder, f"False-{kind}", True, world_size=4)[0]) == []


class Stage(nn.Module):
    """A pipeline stage: some blocks, and its end of the tied weight."""

    def __init__(self, stages: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = runs.Model()
        if 0 in stages:
            self.emb = whole.emb
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in stages})
        if 1 in stages:
            self.head = whole.head

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.pow(2).sum() for parameter in self.parameters()]).sum()


def pipeline(path: str, action: str, stages: list[list[int]]) -> dict[str, Any]:
    module, group = Stage(stages[runs.world()[0]]), runs.control()
    run = runs.Run(module, module, [torch.optim.AdamW(module.parameters(), lr=0.1)])
    ties = {"head.weight": "emb.weight"} if len(stages) > 1 else {}
    order = [name for name, _ in Stage([0, 1]).named_parameters()]
    state = run.state(ties_across_ranks=ties, parameter_order=order)
    options = CheckpointOptions(format="full" if "full" in path else "sharded", timeout_s=120)
    if action == "save":
        module().backward()
        run.optimizers[0].step()
        save_checkpoint(path, state, options=options, control_group=group)
    else:
        load_checkpoint(path, state, LoadRequest(), options=options, control_group=group)
    return {**runs.weights(module), **runs.optimizer_state(run)}


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_pipeline_stages(run_distributed: Any, run_single: Any, tmp_path: Path, kind: str) -> None:
    two, one = [[0], [1]], [[0, 1]]
    first, last = run_distributed(pipeline, str(tmp_path / kind), "save", two, world_size=2)
    single = run_single(pipeline, str(tmp_path / kind), "load", one)
    for stage in (first, last):
        for name, value in stage.items():
            own = name.replace("head.weight", "emb.weight") if name.startswith("0.") else name
            if "group" not in name:
                assert torch.equal(single[own], value), name
    run_single(pipeline, str(tmp_path / f"{kind}-single"), "save", one)
    again = run_distributed(pipeline, str(tmp_path / f"{kind}-single"), "load", two, world_size=2)
    assert torch.equal(again[0]["emb.weight"], again[1]["head.weight"])
    assert torch.equal(again[0]["0.emb.weight.exp_avg"], again[1]["0.head.weight.exp_avg"])
