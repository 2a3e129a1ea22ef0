"""Estimates against published sizes, against sums that must come out, and against what ranks really hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist import RecomputeOptions, estimate
from lightning_pardist.plan.estimate import crosses_nodes
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.device import GIB, parse_device
from lightning_pardist.specs.estimate import Candidate
from lightning_pardist.strategies.estimating import Cluster, Estimator
from lightning_pardist.torch_dtensor_api import local_tensor
from tests.levers.common import Net, data
from tests.strategies.common import make_trainer
from tests.support.marks import transformers_or_skip
from tests.support.pool import WorkerPool


def llama(**sizes: Any) -> L.LightningModule:
    """A causal language model of Llama's shape on the meta device, as a user's LightningModule."""
    transformers = transformers_or_skip()

    class LitLlama(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128256, **sizes))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch, labels=batch, use_cache=False).loss

    return LitLlama()


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.hf
@pytest.mark.timeout(600)
def test_8b_on_8_ranks_has_the_reference_sizes() -> None:
    module = llama(**LLAMA_8B)
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    found = estimate(module, tokens, world_size=8, precision="bf16-mixed", device="h100", zero_stage=3)
    parameters = sum(p.numel() for p in module.parameters())
    assert parameters == 8_030_261_248
    worst = found.worst
    assert worst.optimizer is not None
    assert (worst.parameters + worst.gradients + worst.optimizer) / GIB == pytest.approx(14.96, abs=0.005)
    gathers, reductions = found.traffic
    assert (gathers.count, reductions.count) == (2 * 32 + 1, 32 + 1)
    assert reductions.sent_per_rank / GIB == pytest.approx(26.18, abs=0.005)
    root = 2 * (2 * 128256 * 4096 + 4096) * 7 / 8  # embedding, head and norm stay gathered
    assert (gathers.sent_per_rank + root) / GIB == pytest.approx(26.18, abs=0.005)
    assert found.roofline is not None and found.roofline.seconds > 0


@pytest.mark.hf
def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    """In bfloat16 2 s b h bytes per layer (Korthikanti et al. 2022); between two depths all else is the same."""
    kept, layers = [], (2, 4)
    for count in layers:
        module = llama(**{**LLAMA_8B, "num_hidden_layers": count})
        tokens = torch.zeros(1, 512, dtype=torch.int64)
        for recompute in (RecomputeOptions(), None):
            found = estimate(module, tokens, world_size=8, precision="bf16-mixed", recompute=recompute)
            assert found.worst.activations is not None
            kept.append(found.worst.activations)
    small, small_plain, large, large_plain = kept
    assert large - small == 2 * 2 * 512 * 4096
    assert large_plain - small_plain > 10 * (large - small)


@pytest.mark.hf
@pytest.mark.timeout(600)
def test_70b_on_512_ranks() -> None:
    module = llama(**LLAMA_70B)
    estimator = Estimator(module, torch.zeros(1, 128, dtype=torch.int64), precision="bf16-mixed")
    assert estimator.profile.num_parameters == 70_553_706_496
    config = ParallelConfig(data_parallel_replicate_size=2, data_parallel_shard_size=256)
    found = estimator.estimate(config, Cluster(world_size=512, num_nodes=64, device=parse_device("h100")))
    worst = found.worst
    assert worst.optimizer is not None
    assert (worst.parameters + worst.gradients + worst.optimizer) / GIB == pytest.approx(4.11, abs=0.005)
    assert sum(terms.parameters for terms in found.memory_by_rank[:256]) == 4 * 70_553_706_496
    assert sum(terms.optimizer or 0 for terms in found.memory_by_rank) == 2 * 8 * 70_553_706_496
    assert [each.collective for each in found.traffic] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert all(each.crosses_nodes for each in found.traffic)
    assert len(found.to_dict()["memory_by_rank"]) < 512  # like ranks are told once


def _held(zero_stage: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds after a step."""
    seen: list[int] = []

    class Bytes(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
            grads = [local_tensor(p.grad) for p in module.parameters() if p.grad is not None]
            seen.append(sum(g.nbytes for g in grads))

    module = _Adam()
    layout = {"zero_stage": zero_stage, "data_parallel_replicate_size": 1 if zero_stage else "auto"}
    trainer = make_trainer(layout, dist.get_world_size(), max_steps=1, callbacks=[Bytes()])
    trainer.fit(module, data())
    state = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.numel() > 1 or v.dim()]
    parameters = sum(local_tensor(p.detach()).nbytes for p in module.parameters())
    return parameters, seen[0], sum(local_tensor(v).nbytes for v in state)


class _Adam(Net):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(16, 5)  # rows that no even number divides
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.odd(x.new_ones(x.shape[0], 16)).sum(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize(("zero_stage", "world_size"), [(3, 4), (0, 2)])
def test_every_rank_holds_what_was_foretold(run_distributed: WorkerPool, zero_stage: int, world_size: int) -> None:
    module = _Adam()
    batch = [tensor[:4] for tensor in next(iter(data()))]
    layout = {"zero_stage": zero_stage, "data_parallel_replicate_size": "auto" if zero_stage == 0 else 1}
    found = estimate(module, batch, world_size=world_size, **layout)
    for rank, real in enumerate(run_distributed(_held, zero_stage, world_size=world_size)):
        terms = found.memory_by_rank[rank]
        assert (terms.parameters, terms.gradients, terms.optimizer) == real


def test_layouts_are_ranked_and_the_rest_rejected_with_a_reason() -> None:
    module, batch = Net(depth=6), next(iter(data()))
    estimator = Estimator(module, batch)
    biggest = estimator.layouts(Cluster(world_size=8, num_nodes=2, device=parse_device("h100,memory=1GB")))
    possible = [c for c in biggest if c.rejected is None]
    assert {"ddp", "fsdp 8", "tp 2 x fsdp 4", "pp 2 x fsdp 4", "pp 2 x tp 2 x fsdp 2"} <= {c.layout for c in possible}
    for candidate in refused(biggest):
        assert "tp 4" in candidate.layout and "2 query head(s)" in str(candidate.rejected)
    assert all(c.estimate and c.estimate.idle_share > 0 for c in possible if c.layout.startswith("pp"))
    memory = sorted(c.estimate.worst.total for c in possible if c.estimate)
    limit = memory[len(memory) // 2] / 0.8
    some = estimator.layouts(Cluster(world_size=8, num_nodes=2, device=parse_device(f"h100,memory={limit}")))
    assert {c.layout for c in some} == {c.layout for c in biggest}
    fitting = [c for c in some if c.rejected is None]
    rejected = [c for c in some if c.rejected is not None]
    assert some == fitting + rejected and fitting and rejected
    for candidate in rejected:
        assert candidate.estimate is None or candidate.estimate.worst.total > 0.8 * limit
        assert candidate.estimate is None or "more than 80% of" in str(candidate.rejected)
    seconds = [c.estimate.seconds_per_batch or 0.0 for c in fitting if c.estimate and not c.estimate.worst.host]
    assert seconds == sorted(seconds) and len(seconds) > 1


def refused(candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if c.estimate is None]


def test_which_axes_leave_the_node() -> None:
    sizes = AxisSizes(data_parallel_replicate=2, data_parallel_shard=4, tensor_parallel=2)
    crossing = [axis for axis in sizes.as_dict() if crosses_nodes(sizes, axis, ranks_per_node=8)]
    assert crossing == ["data_parallel_replicate"]
    assert crosses_nodes(sizes, "data_parallel", 8) and not crosses_nodes(sizes, "data_parallel", 16)
    assert crosses_nodes(sizes, "data_parallel_shard", 4) and not crosses_nodes(sizes, "tensor_parallel", 2)


@pytest.mark.parametrize("text", ["h800", "memory=lots", "flops=1e12", "h100,colour=3"])
def test_unknown_devices_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(ValueError, match="a100, h100, h200, b200"):
        parse_device(text)


def test_devices_by_figures() -> None:
    device = parse_device("memory=80GB,flops=989e12,node=450e9,network=50e9")
    assert (device.memory_bytes, device.flops_16, device.network_bytes_per_second) == (80e9, 989e12, 50e9)
    assert dataclasses.replace(parse_device("H100"), memory_bytes=94e9) == parse_device("h100,memory=94GB")
