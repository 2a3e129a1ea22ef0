"""Estimates for 512 ranks against a plan that was carried out: a 70B width on the meta device, without any network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.support.traffic import CollectiveRecorder, Traffic, axis_ranks, totals
from lightning_pardist import PipelineOptions, TensorOptions
from lightning_pardist.apply import apply_plan
from lightning_pardist.apply import order as apply_order
from lightning_pardist.describe.skeleton import Step
from lightning_pardist.mesh import Meshes, build_meshes
from lightning_pardist.plan.estimate import Cluster
from lightning_pardist.plan.rank_view import RankViews
from lightning_pardist.run.pipeline import PipelineRunner, StepRequest
from lightning_pardist.run.stage_program import MicroBatch
from lightning_pardist.run.step import StepRunner
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.strategies.estimating import Estimator
from lightning_pardist.strategies.pipeline_forecast import new_skeleton
from lightning_pardist.torch_dtensor_api import local_tensor
from tests.estimate.live import foretold
from tests.estimate.test_estimate import LLAMA_70B, llama

SHAPE = {**LLAMA_70B, "num_hidden_layers": 8}
CONFIG = ParallelConfig(
    pipeline_parallel_size=8, tensor_parallel_size=8, data_parallel_replicate_size=1, data_parallel_shard_size=8
)


MICROS = 8


class Tall(nn.Module):
    """Eight blocks of eight heads, and a vocabulary that no power of two divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(32, 61)


class LitTall(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = Tall()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.body.words(batch)
        for block in self.body.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.body.head(hidden).flatten(0, 1), batch.flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@contextmanager
def pretended(plan: ParallelPlan, rank: int) -> Iterator[Meshes]:
    """Gives the mesh of a rank that is alone: there is nobody to agree with, and nothing arrives."""
    dist.init_process_group("fake", rank=rank, world_size=plan.sizes.world_size, store=FakeStore())
    with (
        mock.patch.object(dist, "broadcast_object_list"),
        mock.patch.object(apply_order, "check_same_plan"),
        mock.patch.object(apply_order, "check_equal_replicas"),
    ):
        yield build_meshes(plan.sizes, "cpu")


def counted(plan: ParallelPlan, rank: int) -> tuple[Traffic, dict[str, tuple[int, ...]]]:
    """Returns what a step of one rank sends and gathers, and who meets it on the axes."""
    assert plan.pipeline is not None
    module, cpu = LitTall(), torch.device("cpu")
    parts = torch.zeros(MICROS, 16, dtype=torch.int64).split(1)
    skeleton = new_skeleton(module, cpu, plan.precision)
    steps = [Step("training_step", part, (0,)) for part in parts]
    flow, outputs = skeleton.dataflow(plan.pipeline.blocks, steps[0])
    with pretended(plan, rank) as meshes:
        model = apply_plan(module, plan, meshes, cpu)
    StepRunner(model)
    runner = PipelineRunner(model, None)
    micros = [MicroBatch(partial(module.training_step, part, 0), 1.0, outputs, None) for part in parts]
    request = StepRequest(micros, flow, True, lambda _micro, _is_last: nullcontext())
    for _ in range(2):  # the first step does what is done once
        with CollectiveRecorder() as recorder:
            assert not runner.run(request).failures
            runner.finish_gradients(reduce_shards=True, window_ends=True)
    found = {**totals(recorder.collectives, "data"), **totals(recorder.collectives, "stages")}
    names = ("pipeline_parallel", "data_parallel_shard", "data_parallel", "tensor_parallel")
    return found, {name: axis_ranks(meshes, name) for name in names}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_traffic_of_512_ranks(run_single: Any, sequence_parallel: bool) -> None:
    estimator = Estimator(LitTall(), torch.zeros(MICROS, 16, dtype=torch.int64))
    options = TensorOptions(sequence_parallel=sequence_parallel)
    stages = PipelineOptions(num_microbatches=MICROS)
    found = estimator.estimate(CONFIG, Cluster(world_size=512, num_nodes=64), tensor=options, pipeline=stages)
    for rank in (0, 77, 511):  # of the first, an inner and the last stage
        traffic, groups = run_single(counted, found.plan, rank)
        assert foretold(found.traffic_by_rank[rank], groups) == traffic, rank


def held(plan: ParallelPlan, rank: int, shape: dict[str, Any]) -> dict[str, int]:
    """Returns name -> elements of every parameter that a rank holds after the plan was applied."""
    module = llama(**shape)
    with pretended(plan, rank) as meshes:
        model = apply_plan(module, plan, meshes, torch.device("meta"))
    return {n: local_tensor(p.detach()).numel() for n, p in module.named_parameters() if n not in model.absent}


@pytest.mark.hf
@pytest.mark.timeout(600)
def test_elements_of_512_ranks(run_single: Any) -> None:
    estimator = Estimator(llama(**SHAPE), torch.zeros(8, 16, dtype=torch.int64), precision="bf16-mixed")
    plan = estimator.plan(CONFIG, Cluster(world_size=512, num_nodes=64))
    views = RankViews(plan=plan, profile=estimator.profile)
    places = views.places()
    for rank in (0, 13, 449, 511):  # of the first, an inner and the last stage
        view = views.at(places[rank])
        foretold = {p.name: view.elements(p, places[rank]["data_parallel_shard"]) for p in view.profile.parameters}
        assert foretold == run_single(held, plan, rank, SHAPE), rank
    elements = sum(
        view.elements(p, place["data_parallel_shard"])
        for place in places
        for view in [views.at(place)]
        for p in view.profile.parameters
    )
    norms = sum(p.numel for p in estimator.profile.parameters if len(p.shape) == 1)  # whole on the tensor axis
    assert elements == estimator.profile.num_parameters + 7 * norms
