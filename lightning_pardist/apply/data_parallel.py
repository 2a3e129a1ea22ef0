"""Carries out the data-parallel part of a plan with torch's fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from lightning_pardist.apply.materialize import Weights
from lightning_pardist.apply.tensor_parallel import TensorCutter
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.parallel_model import ROOT_CALL, HeldScalar, ParallelModel
from lightning_pardist.specs.parallel_plan import PrecisionPlan, ShardUnit
from lightning_pardist.torch_dist_api import compute_on_local_shards, hide_hooks_from_modes, quiet_forward_hooks


def shard_units(model: ParallelModel, weights: Weights, cutter: TensorCutter | None = None) -> None:
    """Shards the units of the plan, inner before outer, and makes the root callable around any of the user's methods.

    Only one unit exists whole at a time: it is materialized, made equal on all ranks, and cut; on the tensor axis
    first, so that fully_shard cuts what a rank of that axis holds.
    """
    plan, module = model.plan.data_parallel, model.module
    assert model.meshes is not None
    parameters = dict(module.named_parameters())
    ignored = {parameters[name] for name in plan.ignored_parameters} | {held.stored for held in model.scalars}
    ignored |= {parameters[name] for name in model.absent}
    for unit in plan.units:
        if not unit.is_root and model.absent.issuperset(unit.parameters):
            continue  # another stage's
        tops = [module.get_submodule(name) for name in unit.modules]
        for top in tops:
            weights.make_ready(top)
            if cutter is not None:
                cutter.cut(top)
        fully_shard(
            tops if len(tops) > 1 else tops[0],
            mesh=model.meshes.sharding(),
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_precision_policy(unit, model.plan.precision),
            offload_policy=_offload_policy(plan.cpu_offload),
            ignored_params=ignored,
        )
    if cutter is not None:
        compute_on_local_shards(module)
    _hide_inner_units(model)
    call = _RootCall()
    setattr(module, ROOT_CALL, MethodType(call, module))
    register_fsdp_forward_method(module, ROOT_CALL)
    quiet_forward_hooks(cast(FSDPModule, module), lambda: call.running)


def _hide_inner_units(model: ParallelModel) -> None:
    """Keeps the hooks of units inside selectively recomputed blocks out of what the recomputation matches."""
    recompute = model.plan.recompute
    if recompute.mode != "selective":
        return
    inside = tuple(f"{block}." for block in recompute.blocks)
    for unit in model.plan.data_parallel.units:
        if any(name.startswith(inside) for name in unit.modules):
            hide_hooks_from_modes(cast(FSDPModule, model.module.get_submodule(unit.modules[0])))


def hold_scalars(model: ParallelModel, weights: Weights) -> list[HeldScalar]:
    """Replaces parameters of no dim by replicated DTensors; see ``HeldScalar``."""
    assert model.meshes is not None
    mesh = model.meshes.sharding()
    found = []
    for name in model.plan.data_parallel.scalar_parameters:
        if name in model.absent:
            continue
        parameter = model.module.get_parameter(name)
        owners = [
            (module, key)
            for module in model.module.modules()
            for key, own in module.named_parameters(recurse=False, remove_duplicate=False)
            if own is parameter
        ]
        for owner, _ in owners:
            weights.make_ready_own(owner)
        placed = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        held = HeldScalar(owners, nn.Parameter(placed, requires_grad=parameter.requires_grad), parameter)
        held.show_stored()
        found.append(held)
    return found


class _RootCall:
    """Runs a function between the root's hooks. If it calls the root itself, the inner call needs no hooks."""

    def __init__(self) -> None:
        self.running = False

    def __call__(self, _module: nn.Module, fn: Callable[[], Any]) -> Any:
        outer, self.running = self.running, True
        try:
            return fn()
        finally:
            self.running = outer


def _precision_policy(unit: ShardUnit, precision: PrecisionPlan) -> MixedPrecisionPolicy:
    if unit.full_precision:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=_dtype(precision.gather_dtype),
        reduce_dtype=_dtype(precision.reduce_dtype),
        # The root sees the user's batch, whose targets and images must keep their dtype; blocks see hidden states.
        cast_forward_inputs=not unit.is_root,
    )


def _dtype(word: str | None) -> torch.dtype | None:
    return None if word is None else dtype_from_word(word)


def _offload_policy(cpu_offload: bool) -> OffloadPolicy:
    if not cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
