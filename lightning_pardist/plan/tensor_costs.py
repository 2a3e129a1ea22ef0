"""What the tensor axis makes of bytes and of traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_pardist.base import axes
from lightning_pardist.plan.rank_view import RankView
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


def tensor_traffic(profile: ModelProfile, view: RankView) -> tuple[Traffic, ...]:
    """Returns the collectives of one step of one batch on the tensor axis, for the described batch.

    Every region costs two sums: of its output, and of the gradient of its input. Under sequence parallel each is a
    reduce-scatter, with an all-gather for its counterpart in the other pass: 4 + 4 in a block of two regions. The
    ends of a stack (of a stage's part of it) add an all-gather each. What ``run.tensor_gradients`` sums travels once
    per optimizer step. Micro-batches of a pipeline do the same in parts.

    Args:
        profile: with whole parameters.
        view: of what the first rank holds.
    """
    plan, pipeline = view.plan.tensor, view.plan.pipeline
    if plan is None:
        return ()
    times = 1 if pipeline is None else pipeline.num_microbatches
    parts = list(_sequence_parts(view))
    blocks = tuple(f"{block}." for part in parts for block in part)
    here = [(name, nbytes) for name, nbytes in plan.exchanges if name in view.by_name]
    in_blocks = [nbytes for name, nbytes in here if name.startswith(blocks)]
    others = [nbytes for name, nbytes in here if not name.startswith(blocks)]
    whole = tuple(p for p in profile.parameters if p.name in view.by_name)
    sums = summed_gradients(plan, whole, view, 0)
    found = []
    if others or sums:
        found.append(("all_reduce", times * len(others) + len(sums), sum(others) + sum(sums)))
    if in_blocks:
        ends = 2 * len(parts)
        found.append(("all_gather", times * (len(in_blocks) + ends), sum(in_blocks) + ends * in_blocks[-1]))
        found.append(("reduce_scatter", times * len(in_blocks), sum(in_blocks)))
    return tuple(
        Traffic(collective=kind, axis=axes.TENSOR_PARALLEL, count=count, nbytes=nbytes)  # type: ignore[arg-type]
        for kind, count, nbytes in found
    )


def _sequence_parts(view: RankView) -> Iterator[tuple[str, ...]]:
    """Yields the blocks of each stretch of a stack that is sharded over the sequence, stage by stage."""
    tensor, pipeline = view.plan.tensor, view.plan.pipeline
    assert tensor is not None
    for stack in tensor.sequence_stacks:
        if pipeline is None:
            yield stack.blocks
            continue
        for stage in pipeline.stages_of(view.pipeline_rank):
            if blocks := tuple(name for name in stack.blocks if name in stage.blocks):
                yield blocks


def summed_gradients(plan: TensorPlan, parameters: Sequence[ParameterProfile], view: RankView, shard: int) -> list[int]:
    """Returns the bytes of the one sum of gradients per dtype, on one rank of the data axes.

    Args:
        plan: of the tensor axis.
        parameters: what the rank's stages hold, whole.
        view: the same, as a rank holds it.
        shard: the rank's place on the sharding axis.
    """
    layouts = {layout.parameter: layout for layout in plan.layouts}
    total: dict[object, int] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if p.name in layouts:
            parts = [part * p.dtype.itemsize for part in _held_by_several(layouts[p.name], p, view, shard)]
        else:
            parts = [view.elements(p, shard) * p.dtype.itemsize] if p.name in plan.partial_parameters else []
        if parts:
            total[p.dtype] = total.get(p.dtype, 0) + sum(parts)
    return list(total.values())


def _held_by_several(layout: TensorLayout, p: ParameterProfile, view: RankView, shard: int) -> Iterator[int]:
    """Yields the elements of stretches that several ranks hold, once for every set of ranks that hold one."""
    local = view.by_name[p.name]
    rows = view.rows(local, shard)
    begin, end = rows if layout.dim == 0 else (0, layout.local_length(view.tensor_rank))
    each = p.numel // layout.length
    if layout.dim:
        each = each // p.shape[0] * (rows[1] - rows[0])
    position = 0
    for stretch in layout.stretches[view.tensor_rank]:
        holders = sum(stretch in held for held in layout.stretches)
        low, high = max(position, begin), min(position + stretch[1], end)
        if holders > 1 and low < high:
            yield len(layout.stretches) // holders * (high - low) * each
        position += stretch[1]
