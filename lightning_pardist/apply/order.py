"""The one place that knows the order in which a plan is applied."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pardist.apply.block_levers import compile_blocks, recompute_blocks
from lightning_pardist.apply.checks import check_equal_replicas, check_same_plan
from lightning_pardist.apply.data_parallel import hold_scalars, shard_units
from lightning_pardist.apply.materialize import Weights
from lightning_pardist.apply.pipeline import cut_stages, install_stand_ins
from lightning_pardist.apply.tensor_parallel import TensorCutter
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel, remember
from lightning_pardist.specs.parallel_plan import ParallelPlan


def apply_plan(module: nn.Module, plan: ParallelPlan, meshes: Meshes | None, device: torch.device) -> ParallelModel:
    """Spreads a module in place and returns it with what must be done around its steps.

    Every rank of the mesh must call it.

    Args:
        module: the user's module, with real or meta parameters, after ``check_modules``.
        plan: the same on all ranks.
        meshes: the live mesh; None on one rank.
        device: where this rank computes; ``meta`` spreads without making weights, to try a plan or time it.

    Raises:
        ValueError: on all ranks, if ranks hold different plans.
    """
    if meshes is not None:
        check_same_plan(plan, meshes)
    model = ParallelModel(module=module, plan=plan, meshes=meshes)
    if plan.pipeline is not None:
        # Cut first: nobody distributes layers that it then drops.
        model.pipeline = cut_stages(model, device)
    weights = Weights(module, device, meshes, absent=model.absent)
    cutter = TensorCutter(model) if plan.tensor is not None else None
    # Inside compiled code, so that the compiler sees what is recomputed; both before sharding, so that one unit is
    # gathered by hooks around one compiled block.
    recompute_blocks(model)
    compile_blocks(model)
    if plan.data_parallel.kind == "shard":
        # Scalars first: they live inside units that are about to be sharded, and fully_shard refuses them.
        model.scalars = hold_scalars(model, weights)
        shard_units(model, weights, cutter)
    # What no unit held: everything if the model is replicated, else buffers and the parameters of metrics.
    weights.make_ready(module)
    if cutter is not None and plan.data_parallel.kind != "shard":
        cutter.cut_and_hold(module)
    if meshes is not None and device.type != "meta":
        check_equal_replicas(module, meshes, absent=model.absent)
    if model.pipeline is not None:
        install_stand_ins(model)
    remember(model)
    return model
