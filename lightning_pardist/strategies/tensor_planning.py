"""From roles to the plan of the tensor axis, with the module's own words and the user's; without process groups."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.plan import make_tensor_plan, with_sequence_parallel
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import TensorRoles


def plan_from_roles(module: nn.Module, roles: TensorRoles, size: int, options: TensorOptions) -> TensorPlan:
    """Returns what each rank of the tensor axis holds.

    Raises:
        ValueError: if the words do not fit the module, its heads cannot be dealt out, or nothing would be sharded.
    """
    own = getattr(module, "tensor_parallel_plan", None)
    words = own() if callable(own) else None
    plan = make_tensor_plan(roles, size=size, explicit=options.plan, module_plan=words)
    if plan.is_empty:
        reasons = [f"{entry.pattern}: {entry.note}" for entry in plan.entries if entry.note]
        raise ValueError(
            message(
                "A tensor axis needs linear layers that open and close a region; none was found.",
                got="; ".join(reasons[:4]) or f"{type(module).__name__} has no linear layer in its step",
                source="the flow of data through the module's own step",
                change="use strategy='pardist_fsdp', which shards any parameter, or name layers with "
                "TensorOptions(plan={'blocks.*.up': 'column', 'blocks.*.down': 'row'})",
            )
        )
    return plan


def with_options(plan: TensorPlan, profile: ModelProfile, options: TensorOptions) -> TensorPlan:
    """Returns the plan with what the options say of sequences and losses.

    Raises:
        ValueError: if no stack can be sharded over the sequence, where that is asked for.
    """
    plan = replace(plan, loss_parallel=options.loss_parallel)
    return with_sequence_parallel(plan, profile) if options.sequence_parallel else plan
