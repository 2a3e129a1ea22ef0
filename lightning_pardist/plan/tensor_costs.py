"""What the tensor axis makes of bytes and of traffic."""

from __future__ import annotations

from dataclasses import replace

from lightning_pardist.base import axes
from lightning_pardist.plan.tensor_layouts import local_shapes
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import Traffic
from lightning_pardist.specs.tensor_plan import TensorPlan


def profile_on_tensor_axis(profile: ModelProfile, plan: TensorPlan | None, rank: int = 0) -> ModelProfile:
    """Returns the profile with parameters as a rank of the tensor axis holds them; rank 0 holds most."""
    if plan is None:
        return profile
    shapes = local_shapes({p.name: p.shape for p in profile.parameters}, plan.layouts, rank)
    return replace(profile, parameters=tuple(replace(p, shape=shapes[p.name]) for p in profile.parameters))


def tensor_traffic(plan: TensorPlan | None) -> tuple[Traffic, ...]:
    """Returns the collectives of one forward and backward pass on the tensor axis, for the described batch.

    Every region costs two sums: of its output, and of the gradient of its input. Under sequence parallel each is a
    reduce-scatter, with an all-gather for its counterpart in the other pass: 4 + 4 in a block of two regions. The
    ends of a stack add an all-gather each.
    """
    if plan is None:
        return ()
    blocks = [block for stack in plan.sequence_stacks for block in stack.blocks]
    in_blocks = [n for name, n in plan.exchanges if any(name.startswith(block + ".") for block in blocks)]
    others = [n for name, n in plan.exchanges if not any(name.startswith(block + ".") for block in blocks)]
    found = []
    if others:
        found.append(("all_reduce", len(others), sum(others)))
    if in_blocks:
        ends = 2 * len(plan.sequence_stacks)
        found.append(("all_gather", len(in_blocks) + ends, sum(in_blocks) + ends * in_blocks[-1]))
        found.append(("reduce_scatter", len(in_blocks), sum(in_blocks)))
    return tuple(
        Traffic(collective=kind, axis=axes.TENSOR_PARALLEL, count=count, nbytes=nbytes)  # type: ignore[arg-type]
        for kind, count, nbytes in found
    )
