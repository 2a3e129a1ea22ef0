"""Bytes that each rank holds at the worst moment of a step. One function per term, over plan and profile.

parameters, gradients, optimizer    what the rank stores of all tensors (see ``rank_view``), in their stored dtypes
gather buffers                      what is whole for a while: see ``gather_buffers``
activations                         what autograd keeps of the batches under way, after recomputation
stage buffers                       what a pipeline stage receives for all micro-batches of a step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_pardist.base import axes
from lightning_pardist.plan.costs import gather_itemsize, padded_numel, reduce_itemsize
from lightning_pardist.plan.rank_view import Place, RankView, RankViews
from lightning_pardist.specs.estimate import MemoryTerms, RankWork
from lightning_pardist.specs.model_profile import ModelProfile, ParameterProfile
from lightning_pardist.specs.parallel_plan import ParallelPlan, ShardUnit


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the terms depend on."""

    plan: ParallelPlan
    profile: ModelProfile
    optimizer_bytes_per_element: float | None
    work: tuple[RankWork, ...]
    """By rank of the pipeline; one entry without stages."""
    idle_share: float = 0.0
    """Of a pipeline's schedule."""
    accumulates: bool = False
    """Whether gradients of several micro-batches are added up before they are reduced."""

    @cached_property
    def views(self) -> RankViews:
        """What ranks hold of the parameters."""
        return RankViews(plan=self.plan, profile=self.profile)

    def work_at(self, place: Place) -> RankWork:
        """Returns the work of the rank at a place."""
        return self.work[place[axes.PIPELINE_PARALLEL]]


def memory_by_rank(held: Held) -> tuple[MemoryTerms, ...]:
    """Returns the terms of every rank of the mesh, in the order of ranks."""
    known: dict[tuple[int, int, int], MemoryTerms] = {}
    found = []
    for place in held.views.places():
        key = held.views.key(place)
        if key not in known:
            known[key] = _terms(held, place)
        found.append(known[key])
    return tuple(found)


def _terms(held: Held, place: Place) -> MemoryTerms:
    view, shard, work = held.views.at(place), place[axes.DATA_PARALLEL_SHARD], held.work_at(place)
    state = (parameters(view, shard), gradients(view, shard), optimizer(held, view, shard))
    offloaded = held.plan.data_parallel.cpu_offload
    stored, grads, moments = (0, 0, 0) if offloaded else state
    return MemoryTerms(
        parameters=stored,
        gradients=grads,
        optimizer=moments,
        activations=work.activation_bytes,
        gather_buffers=gather_buffers(held, view),
        buffers=held.profile.buffer_bytes,
        stage_buffers=work.stage_buffer_bytes,
        host=sum(part or 0 for part in state) if offloaded else 0,
    )


def parameters(view: RankView, shard: int) -> int:
    """Bytes of the parameters that a rank stores."""
    return sum(view.elements(p, shard) * p.dtype.itemsize for p in view.profile.parameters)


def gradients(view: RankView, shard: int) -> int:
    """Bytes of the gradients that a rank stores until the optimizer's step."""
    return sum(view.elements(p, shard) * p.dtype.itemsize for p in view.trainable)


def optimizer(held: Held, view: RankView, shard: int) -> int | None:
    """Bytes of the optimizer's state, None if unknown."""
    if held.optimizer_bytes_per_element is None:
        return None
    return round(sum(view.elements(p, shard) for p in view.trainable) * held.optimizer_bytes_per_element)


def gather_buffers(held: Held, view: RankView) -> int:
    """Bytes of what is whole for a while, at the worst moment.

    With reshard (ZeRO-3) that is in the backward pass: the root, the unit at work and the one that is gathered ahead;
    the gradient of the unit at work, and the reduction's input of the unit before. Without (ZeRO-1, 2) all units are
    whole. While gradients are added up whole (ZeRO-1 that accumulates, the micro-batches of a pipeline) all of them
    are, in the dtype of the reduction. Copies (ZeRO-0) gather nothing: gradients are their buckets.
    """
    data = view.data_parallel
    if data.kind != "shard":
        return 0
    units = [unit for unit in data.units if unit.parameters]
    gathered = [_gathered(view, unit) for unit in units]
    freed = sorted(
        (size for size, unit in zip(gathered, units, strict=True) if unit.reshard_after_forward), reverse=True
    )
    kept = sum(size for size, unit in zip(gathered, units, strict=True) if not unit.reshard_after_forward)
    reduced = sorted((_reduced(view, unit) for unit in units), reverse=True)
    fresh = sorted((_whole_gradient(view, unit) for unit in units), reverse=True)
    adds_up_whole = held.plan.pipeline is not None or (data.zero_stage == 1 and held.accumulates)
    added_up = sum(_added_up_gradient(view, unit) for unit in units) if adds_up_whole else 0
    return kept + sum(freed[:2]) + (added_up or sum(fresh[:1])) + sum(reduced[:1])


def _gathered(view: RankView, unit: ShardUnit) -> int:
    ways, precision = view.plan.sizes.data_parallel_shard, view.plan.precision
    return sum(padded_numel(p, ways) * gather_itemsize(p, unit, precision) for p in _members(view, unit))


def _whole_gradient(view: RankView, unit: ShardUnit) -> int:
    """A gradient has the dtype in which the parameter was gathered."""
    precision = view.plan.precision
    return sum(p.numel * gather_itemsize(p, unit, precision) for p in _members(view, unit) if p.requires_grad)


def _added_up_gradient(view: RankView, unit: ShardUnit) -> int:
    """Sums are kept in the dtype of the reduction."""
    precision = view.plan.precision
    return sum(p.numel * reduce_itemsize(p, unit, precision) for p in _members(view, unit) if p.requires_grad)


def _reduced(view: RankView, unit: ShardUnit) -> int:
    ways, precision = view.plan.sizes.data_parallel_shard, view.plan.precision
    trainable = [p for p in _members(view, unit) if p.requires_grad]
    return sum(padded_numel(p, ways) * reduce_itemsize(p, unit, precision) for p in trainable)


def _members(view: RankView, unit: ShardUnit) -> list[ParameterProfile]:
    return [view.by_name[name] for name in unit.parameters]
