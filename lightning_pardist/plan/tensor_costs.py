"""What the tensor axis makes of bytes and of traffic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_pardist.base import axes
from lightning_pardist.plan.tensor_layouts import local_shapes
from lightning_pardist.specs.model_profile import ModelProfile, ParameterProfile
from lightning_pardist.specs.parallel_plan import Traffic
from lightning_pardist.specs.tensor_plan import TensorLayout, TensorPlan


def profile_on_tensor_axis(profile: ModelProfile, plan: TensorPlan | None, rank: int = 0) -> ModelProfile:
    """Returns the profile with parameters as a rank of the tensor axis holds them; rank 0 holds most."""
    if plan is None:
        return profile
    shapes = local_shapes({p.name: p.shape for p in profile.parameters}, plan.layouts, rank)
    return replace(profile, parameters=tuple(replace(p, shape=shapes[p.name]) for p in profile.parameters))


def tensor_traffic(plan: TensorPlan | None, profile: ModelProfile, shard_size: int) -> tuple[Traffic, ...]:
    """Returns the collectives of one step of one micro-batch on the tensor axis, for the described batch.

    Every region costs two sums: of its output, and of the gradient of its input. Under sequence parallel each is a
    reduce-scatter, with an all-gather for its counterpart in the other pass: 4 + 4 in a block of two regions. The
    ends of a stack add an all-gather each. What ``run.tensor_gradients`` sums travels once per optimizer step.

    Args:
        plan: None if the tensor axis has one rank.
        profile: with whole parameters.
        shard_size: ranks that fully_shard cuts each parameter over.
    """
    if plan is None:
        return ()
    blocks = [block for stack in plan.sequence_stacks for block in stack.blocks]
    in_blocks = [n for name, n in plan.exchanges if any(name.startswith(block + ".") for block in blocks)]
    others = [n for name, n in plan.exchanges if not any(name.startswith(block + ".") for block in blocks)]
    others += _summed_gradients(plan, profile, shard_size)
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


def _summed_gradients(plan: TensorPlan, profile: ModelProfile, shard_size: int) -> list[int]:
    """Returns the bytes of the one sum of gradients per dtype, on the first rank of the data axes."""
    layouts = {layout.parameter: layout for layout in plan.layouts}
    total: Counter[object] = Counter()
    for p in profile.parameters:
        if not p.requires_grad or not p.shape:
            continue
        if p.name in layouts:
            total[p.dtype] += sum(_held_by_several(p, layouts[p.name], shard_size)) * p.dtype.itemsize
        elif p.name in plan.partial_parameters:
            total[p.dtype] += -(-p.shape[0] // shard_size) * math.prod(p.shape[1:]) * p.dtype.itemsize
    return [nbytes for nbytes in total.values() if nbytes]


def _held_by_several(p: ParameterProfile, layout: TensorLayout, shard_size: int) -> Iterator[int]:
    """Yields the elements of stretches that several ranks hold, once for every set of ranks that hold one."""
    each = p.numel // layout.length
    end = -(-layout.local_length(0) // shard_size) if layout.dim == 0 else layout.local_length(0)
    if layout.dim:
        each = each // p.shape[0] * -(-p.shape[0] // shard_size)
    position = 0
    for stretch in layout.stretches[0]:
        holders = sum(stretch in held for held in layout.stretches)
        length = max(min(position + stretch[1], end) - position, 0)
        if holders > 1:
            yield len(layout.stretches) // holders * length * each
        position += stretch[1]
