"""The plan of the tensor axis: the user's words, what the flow of data says, and the proof by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.mesh import Meshes
from lightning_pardist.plan import make_tensor_plan, with_sequence_parallel
from lightning_pardist.plan.tensor_words import check_positions, sequence_words
from lightning_pardist.run.agree import on_first_rank
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import RegionProbe, StackProbe, TensorRoles
from lightning_pardist.specs.tensor_words import Given, Source
from lightning_pardist.strategies import lightning_data_api
from lightning_pardist.strategies.first_step import FirstStep, prove_first_step
from lightning_pardist.strategies.sample import Sample
from lightning_pardist.strategies.tensor_probe import prove_plan, prove_sequence
from lightning_pardist.strategies.tensor_styles import without_styles


@dataclass(frozen=True, kw_only=True)
class TensorSetup:
    """What the plan of the tensor axis is made from."""

    module: LightningModule
    profile: ModelProfile
    sample: Sample | None
    options: TensorOptions
    precision: Precision
    meshes: Meshes
    device: torch.device


def plan_tensor_axis(setup: TensorSetup) -> TensorPlan:
    """Returns the plan of the tensor axis, the same on all ranks; every rank must call it.

    Raises:
        ValueError: on all ranks, if no plan can be derived, it would shard nothing, or shares compute something else.
    """
    module, options = setup.module, setup.options
    words = _words(module, options)
    on_positions = sequence_words(words)
    check_positions(words, is_sharded=options.sequence_parallel or bool(on_positions))
    plan, probes, stacks = on_first_rank(lambda: _derived(setup, words), setup.meshes)
    if plan.is_empty:
        raise _nothing_to_shard(plan, module)
    checks = options.verify != "off"
    if checks:
        plan = prove_plan(module, plan, probes, setup.meshes, setup.device)
    plan = replace(plan, loss_parallel=options.loss_parallel)
    if options.sequence_parallel or on_positions:
        plan = with_sequence_parallel(plan, setup.profile, on_positions, everywhere=options.sequence_parallel)
        if checks:
            plan = prove_sequence(module, plan, stacks, setup.meshes, setup.device)
    if options.verify == "full":
        assert setup.sample is not None
        plan = prove_first_step(plan, FirstStep(module, setup.profile, setup.sample, setup.meshes, setup.device))
    return plan


def unproved_plan(
    module: nn.Module, profile: ModelProfile, roles: TensorRoles, size: int, options: TensorOptions
) -> TensorPlan:
    """Returns the same plan without process groups, and so without a proof by numbers.

    Raises:
        ValueError: if no plan can be made, or it would shard nothing.
    """
    words = _words(module, options)
    on_positions = sequence_words(words)
    check_positions(words, is_sharded=options.sequence_parallel or bool(on_positions))
    plan = make_tensor_plan(roles, size=size, explicit=words["explicit"], module_plan=words["module"])
    if plan.is_empty:
        raise _nothing_to_shard(plan, module)
    plan = replace(plan, loss_parallel=options.loss_parallel)
    if options.sequence_parallel or on_positions:
        plan = with_sequence_parallel(plan, profile, on_positions, everywhere=options.sequence_parallel)
    return plan


def _words(module: nn.Module, options: TensorOptions) -> dict[Source, dict[str, Given]]:
    own = getattr(module, "tensor_parallel_plan", None)
    return {
        "explicit": without_styles(options.plan, "explicit"),
        "module": without_styles(own() if callable(own) else None, "module"),
    }


def _derived(
    setup: TensorSetup, words: Mapping[Source, Mapping[str, Given]]
) -> tuple[TensorPlan, tuple[RegionProbe, ...], tuple[StackProbe, ...]]:
    module, sample = setup.module, setup.sample
    if sample is None:
        raise ValueError(
            message(
                "A tensor-parallel plan is derived from one step of the module, which needs a batch.",
                got="no training data, no example_input_array, no sample_batch",
                source=f"{type(module).__name__} and the strategy's arguments",
                change="give HybridStrategy(sample_batch=...) or set self.example_input_array",
            )
        )
    batch = setup.precision.convert_input(sample.batch)
    with lightning_data_api.transfer_hooks_of_data_module(module):
        roles = derive_roles(module, batch, entry=sample.entry, device=setup.device)
    size = setup.meshes.sizes.tensor_parallel
    plan = make_tensor_plan(roles, size=size, explicit=words["explicit"], module_plan=words["module"])
    return plan, roles.probes, roles.stack_probes


def _nothing_to_shard(plan: TensorPlan, module: nn.Module) -> ValueError:
    reasons = [f"{entry.pattern}: {entry.note}" for entry in plan.entries if entry.note]
    return ValueError(
        message(
            "A tensor axis needs linear layers that open and close a region; none was found.",
            got="; ".join(reasons[:4]) or f"{type(module).__name__} has no linear layer in its step",
            source="the flow of data through the module's own step",
            change="use strategy='pardist_fsdp', which shards any parameter, or name layers with "
            "TensorOptions(plan={'blocks.*.up': 'column', 'blocks.*.down': 'row'})",
        )
    )
