"""Estimates for 512 ranks against a plan that was carried out: a 70B width on the meta device, without any network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_pardist.apply import apply_plan
from lightning_pardist.apply import order as apply_order
from lightning_pardist.apply import pipeline as apply_pipeline
from lightning_pardist.mesh import build_meshes
from lightning_pardist.plan.estimate import Cluster
from lightning_pardist.plan.rank_view import RankViews
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.strategies.estimating import Estimator
from lightning_pardist.torch_dtensor_api import local_tensor
from tests.estimate.test_estimate import LLAMA_70B, llama

SHAPE = {**LLAMA_70B, "num_hidden_layers": 8}
CONFIG = ParallelConfig(
    pipeline_parallel_size=8, tensor_parallel_size=8, data_parallel_replicate_size=1, data_parallel_shard_size=8
)


def held(plan: ParallelPlan, rank: int, shape: dict[str, Any]) -> dict[str, int]:
    """Returns name -> elements of every parameter that a rank holds after the plan was applied."""
    dist.init_process_group("fake", rank=rank, world_size=plan.sizes.world_size, store=FakeStore())
    # Nobody is there to agree with.
    apply_pipeline._common_seed = lambda meshes: 0  # type: ignore[assignment]
    apply_order.check_same_plan = lambda plan, meshes: None  # type: ignore[assignment]
    module = llama(**shape)
    model = apply_plan(module, plan, build_meshes(plan.sizes, "cpu"), torch.device("meta"))
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
