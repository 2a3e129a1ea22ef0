"""Bytes and collectives of a plan against published formulas and reference sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pardist.specs.parallel_plan import ParallelPlan
from tests.plan.common import BF16_MIXED, Tower, plan_of, root_of, rows

GIB = 2**30
PSI_8B = 8_030_261_248


class LlamaShape(nn.Module):
    """The parameters of a Llama 3 model, without its arithmetic."""

    class Block(nn.Module):
        def __init__(self, width: int, inner: int, kv: int) -> None:
            super().__init__()
            for name, rows_, columns in (("q", width, width), ("k", kv, width), ("v", kv, width), ("o", width, width)):
                setattr(self, name, nn.Linear(columns, rows_, bias=False))
            self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
            self.down = nn.Linear(inner, width, bias=False)
            self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def __init__(self, layers: int, width: int, inner: int, kv: int, vocabulary: int = 128_256) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList([self.Block(width, inner, kv) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)


@pytest.fixture(scope="module")
def llama_8b() -> nn.Module:
    with torch.device("meta"):
        return LlamaShape(32, 4096, 14_336, 1024)


@pytest.fixture(scope="module")
def llama_70b() -> nn.Module:
    with torch.device("meta"):
        return LlamaShape(80, 8192, 28_672, 1024)


def traffic(plan: ParallelPlan) -> dict[str, tuple[str, int, int]]:
    return {t.collective: (t.axis, t.count, t.nbytes) for t in plan.traffic}


@pytest.mark.parametrize(("stage", "gathers"), [(1, 4), (2, 4), (3, 7)])
def test_collectives_of_a_step(stage: int, gathers: int) -> None:
    """N = 3 blocks and a root: N + 1 all-gathers, with freed blocks 2 N + 1; N + 1 reduce-scatters."""
    found = traffic(plan_of(Tower(), rows(), zero_stage=stage))
    assert set(found) == {"all_gather", "reduce_scatter"}
    assert found["all_gather"][:2] == ("data_parallel_shard", gathers)
    assert found["reduce_scatter"][:2] == ("data_parallel_shard", 4)


def test_replicas_add_one_all_reduce_per_unit_of_a_shard() -> None:
    module = Tower()
    plain, hybrid = traffic(plan_of(module, rows())), traffic(plan_of(module, rows(), replicate=2))
    assert hybrid["all_reduce"] == ("data_parallel_replicate", 4, plain["reduce_scatter"][2] // 4)
    assert {k: v for k, v in hybrid.items() if k != "all_reduce"} == plain


def test_replicated_modules_reduce_every_gradient_once() -> None:
    module = Tower()
    found = traffic(plan_of(module, rows(), replicate=2, shard=1))
    assert found == {"all_reduce": ("data_parallel", 1, 4 * sum(p.numel() for p in module.parameters()))}


def test_frozen_units_are_gathered_and_not_reduced() -> None:
    module = Tower()
    module.blocks[0].requires_grad_(False)
    found = traffic(plan_of(module, rows()))
    assert (found["all_gather"][1], found["reduce_scatter"][1]) == (7, 3)


def test_8b_on_8_ranks(llama_8b: nn.Module) -> None:
    """State of 14.96 GiB a rank; bf16-mixed gathers 2 x 2 Psi bytes and reduces 4 Psi, which a ring makes 26.18 GiB."""
    plan = plan_of(llama_8b, shard=8, precision=BF16_MIXED, optimizer_bytes=8.0)
    assert sum(p.numel() for p in llama_8b.parameters()) == PSI_8B
    state = plan.state_per_rank
    assert (state.parameters, state.gradients, state.optimizer) == (PSI_8B // 2, PSI_8B // 2, PSI_8B)
    assert round((state.parameters + state.gradients + PSI_8B) / GIB, 2) == 14.96
    found = traffic(plan)
    root = sum(llama_8b.get_parameter(name).numel() for name in root_of(plan).parameters)
    assert found["all_gather"] == ("data_parallel_shard", 65, 2 * (2 * PSI_8B - root))
    assert found["reduce_scatter"] == ("data_parallel_shard", 33, 4 * PSI_8B)
    assert round(found["reduce_scatter"][2] * 7 / 8 / GIB, 2) == 26.18
    assert round((found["all_gather"][2] + 2 * root) * 7 / 8 / GIB, 2) == 26.18  # with a root that is freed as well


def test_70b_state(llama_70b: nn.Module) -> None:
    psi = sum(p.numel() for p in llama_70b.parameters())
    assert psi == 70_553_706_496
    plan = plan_of(llama_70b, shard=256, optimizer_bytes=8.0)
    state = plan.state_per_rank
    assert state.optimizer is not None
    total = state.parameters + state.gradients + state.optimizer
    assert total == 16 * psi // 256
    assert round(total / GIB, 2) == 4.11
    one = plan.state_one_process
    assert (one.parameters, one.optimizer) == (4 * psi, 8 * psi)


@pytest.mark.parametrize("shard", [2, 3, 5, 8, 64])
def test_state_counts_padding_of_uneven_dims(shard: int) -> None:
    module = Tower(width=7)
    plan = plan_of(module, rows(7), shard=shard, optimizer_bytes=8.0)
    elements = sum(math.ceil(p.shape[0] / shard) * math.prod(p.shape[1:]) for p in module.parameters())
    state = plan.state_per_rank
    assert (state.parameters, state.gradients, state.optimizer) == (4 * elements, 4 * elements, 8 * elements)


def test_scalars_are_whole_on_every_rank() -> None:
    module: Any = Tower()
    plain = plan_of(module, rows())
    module.scale = nn.Parameter(torch.tensor(1.0))
    scaled = plan_of(module, optimizer_bytes=8.0)
    assert scaled.data_parallel.scalar_parameters == ("scale",)
    assert scaled.state_per_rank.parameters == plain.state_per_rank.parameters + 4
    assert traffic(scaled)["all_reduce"][:2] == ("data_parallel", 1)


def test_parameters_of_metrics_are_not_sharded() -> None:
    import torchmetrics

    module: Any = Tower()
    plain = plan_of(module)
    module.metric = torchmetrics.MeanMetric()
    module.metric.inner = nn.Linear(8, 8)
    measured = plan_of(module)
    assert traffic(measured) == traffic(plain)
    assert measured.state_per_rank.parameters == plain.state_per_rank.parameters + 4 * 72


def test_large_replicated_modules_reduce_in_buckets() -> None:
    """torch closes a first bucket at 1 MiB and further ones at 25 MiB."""
    module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(20)])  # 4 MiB each
    found = traffic(plan_of(module, (torch.zeros(1, 1024),), replicate=2, shard=1))
    assert found["all_reduce"] == ("data_parallel", 1 + 3, 80 * 2**20)  # 1, then 7, 7 and 5 of them
