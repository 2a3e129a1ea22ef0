"""What the tensor axis makes of bytes and of traffic."""

from __future__ import annotations

from dataclasses import replace

from lightning_pardist.base import axes
from lightning_pardist.plan.tensor_layouts import local_shapes
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import Traffic
from lightning_pardist.specs.tensor_roles import TensorPlan


def profile_on_tensor_axis(profile: ModelProfile, plan: TensorPlan | None, rank: int = 0) -> ModelProfile:
    """Returns the profile with parameters as a rank of the tensor axis holds them; rank 0 holds most."""
    if plan is None:
        return profile
    shapes = local_shapes({p.name: p.shape for p in profile.parameters}, plan.layouts, rank)
    return replace(profile, parameters=tuple(replace(p, shape=shapes[p.name]) for p in profile.parameters))


def tensor_traffic(plan: TensorPlan | None) -> tuple[Traffic, ...]:
    """Returns the collectives of one forward and backward pass on the tensor axis, for the described batch."""
    if plan is None or not plan.exchanges:
        return ()
    return (
        Traffic(
            collective="all_reduce",
            axis=axes.TENSOR_PARALLEL,
            count=len(plan.exchanges),
            nbytes=sum(plan.exchanges),
        ),
    )
