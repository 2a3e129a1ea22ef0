"""Bytes that each rank holds at the worst moment of a step. One function per term, over plan and profile.

Of the data axes, with d ranks that share one copy (FSDP2 cuts dim 0 into d chunks of ceil(rows / d), so the first rank
holds most and the last may hold nothing):

    parameters, gradients, optimizer    a rank's chunks of all tensors, in their stored dtypes
    gather buffers                      what is whole for a while: see ``gather_buffers``
    activations                         what autograd keeps of one batch, after recomputation; the same on all ranks

Another axis divides terms of its own here: a function takes the rank's place on the mesh, so it can ask for any axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_pardist.base import axes
from lightning_pardist.plan.costs import gather_itemsize, padded_numel, reduce_itemsize
from lightning_pardist.specs.estimate import MemoryTerms
from lightning_pardist.specs.model_profile import ModelProfile, ParameterProfile
from lightning_pardist.specs.parallel_plan import ParallelPlan, ShardUnit

Place = Mapping[str, int]
"""Axis -> coordinate."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the terms depend on."""

    plan: ParallelPlan
    profile: ModelProfile
    optimizer_bytes_per_element: float | None
    activation_bytes: int | None
    """Of one batch of one rank, after recomputation."""
    accumulates: bool = False
    """Whether gradients of several micro-batches are added up before they are reduced."""

    @cached_property
    def by_name(self) -> dict[str, ParameterProfile]:
        """Parameters by their first names."""
        return {p.name: p for p in self.profile.parameters}

    @cached_property
    def whole(self) -> frozenset[str]:
        """Names of parameters that every rank holds whole."""
        data = self.plan.data_parallel
        if data.kind != "shard":
            return frozenset(self.by_name)
        return frozenset((*data.scalar_parameters, *data.ignored_parameters))

    def elements(self, p: ParameterProfile, place: Place) -> int:
        """Elements of a parameter that the rank at ``place`` stores."""
        if p.name in self.whole or not p.shape:
            return p.numel
        ways, index = self.plan.sizes.data_parallel_shard, place[axes.DATA_PARALLEL_SHARD]
        chunk = math.ceil(p.shape[0] / ways)
        rows = max(0, min(chunk, p.shape[0] - index * chunk))
        return rows * math.prod(p.shape[1:])


def memory_by_rank(held: Held) -> tuple[MemoryTerms, ...]:
    """Returns the terms of every rank of the mesh, in the order of ranks."""
    places = _places(held.plan)
    # Ranks that differ on no axis that divides anything hold the same.
    known: dict[int, MemoryTerms] = {}
    found = []
    for place in places:
        key = place[axes.DATA_PARALLEL_SHARD]
        if key not in known:
            known[key] = _terms(held, place)
        found.append(known[key])
    return tuple(found)


def _terms(held: Held, place: Place) -> MemoryTerms:
    state = (parameters(held, place), gradients(held, place), optimizer(held, place))
    offloaded = held.plan.data_parallel.cpu_offload
    stored, grads, moments = (0, 0, 0) if offloaded else state
    return MemoryTerms(
        parameters=stored,
        gradients=grads,
        optimizer=moments,
        activations=held.activation_bytes,
        gather_buffers=gather_buffers(held),
        buffers=held.profile.buffer_bytes,
        host=sum(part or 0 for part in state) if offloaded else 0,
    )


def parameters(held: Held, place: Place) -> int:
    """Bytes of the parameters that a rank stores."""
    return sum(held.elements(p, place) * p.dtype.itemsize for p in held.profile.parameters)


def gradients(held: Held, place: Place) -> int:
    """Bytes of the gradients that a rank stores until the optimizer's step."""
    return sum(held.elements(p, place) * p.dtype.itemsize for p in held.profile.parameters if p.requires_grad)


def optimizer(held: Held, place: Place) -> int | None:
    """Bytes of the optimizer's state, None if unknown."""
    if held.optimizer_bytes_per_element is None:
        return None
    elements = sum(held.elements(p, place) for p in held.profile.parameters if p.requires_grad)
    return round(elements * held.optimizer_bytes_per_element)


def gather_buffers(held: Held) -> int:
    """Bytes of what is whole for a while, at the worst moment.

    With reshard (ZeRO-3) that is in the backward pass: the root, the unit at work and the one that is gathered ahead;
    the gradient of the unit at work, and the reduction's input of the unit before. Without (ZeRO-1, 2) all units are
    whole; while ZeRO-1 accumulates, so are all gradients. Copies (ZeRO-0) gather nothing: gradients are their buckets.
    """
    data = held.plan.data_parallel
    if data.kind != "shard":
        return 0
    units = [unit for unit in data.units if unit.parameters]
    gathered = [_gathered(held, unit) for unit in units]
    freed = sorted(
        (size for size, unit in zip(gathered, units, strict=True) if unit.reshard_after_forward), reverse=True
    )
    kept = sum(size for size, unit in zip(gathered, units, strict=True) if not unit.reshard_after_forward)
    reduced = sorted((_reduced(held, unit) for unit in units), reverse=True)
    whole_gradients = sorted((_whole_gradient(held, unit) for unit in units), reverse=True)
    in_flight = sum(whole_gradients) if data.zero_stage == 1 and held.accumulates else sum(whole_gradients[:1])
    return kept + sum(freed[:2]) + in_flight + sum(reduced[:1])


def _gathered(held: Held, unit: ShardUnit) -> int:
    ways, precision = held.plan.sizes.data_parallel_shard, held.plan.precision
    members = [held.by_name[name] for name in unit.parameters]
    return sum(padded_numel(p, ways) * gather_itemsize(p, unit, precision) for p in members)


def _whole_gradient(held: Held, unit: ShardUnit) -> int:
    """A gradient has the dtype in which the parameter was gathered."""
    precision = held.plan.precision
    members = [held.by_name[name] for name in unit.parameters]
    return sum(p.numel * gather_itemsize(p, unit, precision) for p in members if p.requires_grad)


def _reduced(held: Held, unit: ShardUnit) -> int:
    ways, precision = held.plan.sizes.data_parallel_shard, held.plan.precision
    members = [held.by_name[name] for name in unit.parameters]
    return sum(padded_numel(p, ways) * reduce_itemsize(p, unit, precision) for p in members if p.requires_grad)


def _places(plan: ParallelPlan) -> list[Place]:
    sizes = plan.sizes.as_dict()
    places: list[Place] = []
    for rank in range(plan.sizes.world_size):
        place: dict[str, int] = {}
        rest = rank
        for axis in reversed(axes.AXES):
            rest, place[axis] = divmod(rest, sizes[axis])
        places.append(place)
    return places
