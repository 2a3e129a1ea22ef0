"""What one rank of the mesh holds of a module's parameters: its stages, its share of matrices, its chunks.

Of the pipeline axis a rank has the parameters that its stages need (tied weights on several ranks), of the tensor axis
its stretches of a dim, and of what is left FSDP2 cuts dim 0 into d chunks of ceil(rows / d), so the first rank of the
data axes holds most and the last may hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_pardist.base import axes
from lightning_pardist.plan.pipeline_report import units_of
from lightning_pardist.plan.tensor_layouts import local_shapes
from lightning_pardist.specs.model_profile import ModelProfile, ParameterProfile
from lightning_pardist.specs.parallel_plan import DataParallelPlan, ParallelPlan

Place = Mapping[str, int]
"""Axis -> coordinate."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """The parameters of the ranks at one place of the pipeline and the tensor axis."""

    plan: ParallelPlan
    profile: ModelProfile
    """With the parameters that are here, as long as they are here."""
    pipeline_rank: int
    tensor_rank: int

    @cached_property
    def by_name(self) -> dict[str, ParameterProfile]:
        """Parameters by their first names."""
        return {p.name: p for p in self.profile.parameters}

    @cached_property
    def data_parallel(self) -> DataParallelPlan:
        """Sharding units, with what of them is here."""
        return units_of(self.plan.data_parallel, self.profile)

    @property
    def trainable(self) -> tuple[ParameterProfile, ...]:
        """Parameters that get gradients."""
        return tuple(p for p in self.profile.parameters if p.requires_grad)

    @cached_property
    def _whole(self) -> frozenset[str]:
        """Names of parameters that no chunks are made of."""
        data = self.plan.data_parallel
        if data.kind != "shard":
            return frozenset(self.by_name)
        return frozenset((*data.scalar_parameters, *data.ignored_parameters))

    def rows(self, p: ParameterProfile, shard: int) -> tuple[int, int]:
        """Returns the first row and the row after the last that the rank ``shard`` of the sharding axis stores."""
        assert p.shape
        if p.name in self._whole:
            return 0, p.shape[0]
        chunk = math.ceil(p.shape[0] / self.plan.sizes.data_parallel_shard)
        return min(shard * chunk, p.shape[0]), min((shard + 1) * chunk, p.shape[0])

    def elements(self, p: ParameterProfile, shard: int) -> int:
        """Returns the elements of a parameter that the rank ``shard`` of the sharding axis stores."""
        if not p.shape:
            return p.numel
        begin, end = self.rows(p, shard)
        return (end - begin) * math.prod(p.shape[1:])


@dataclass(frozen=True, kw_only=True)
class RankViews:
    """The views of all ranks, each made once."""

    plan: ParallelPlan
    profile: ModelProfile
    _made: dict[tuple[int, int], RankView] = field(default_factory=dict)

    def at(self, place: Place) -> RankView:
        """Returns the view of the ranks at a place; ranks of the tensor axis that hold as much share one."""
        key = place[axes.PIPELINE_PARALLEL], self._like[place[axes.TENSOR_PARALLEL]]
        if key not in self._made:
            self._made[key] = self._view(*key)
        return self._made[key]

    def key(self, place: Place) -> tuple[int, int, int]:
        """Returns what ranks share that hold and send the same."""
        view = self.at(place)
        shard = place[axes.DATA_PARALLEL_SHARD] if self.plan.data_parallel.kind == "shard" else 0
        return view.pipeline_rank, self._like[place[axes.TENSOR_PARALLEL]], shard

    def places(self) -> list[Place]:
        """Returns the place of every rank, in the order of ranks."""
        sizes = self.plan.sizes.as_dict()
        places: list[Place] = []
        for rank in range(self.plan.sizes.world_size):
            place: dict[str, int] = {}
            rest = rank
            for axis in reversed(axes.AXES):
                rest, place[axis] = divmod(rest, sizes[axis])
            places.append(place)
        return places

    @cached_property
    def _like(self) -> tuple[int, ...]:
        """By rank of the tensor axis, the first rank that holds as much of everything."""
        tensor = self.plan.tensor
        if tensor is None:
            return (0,)
        held = [tuple(layout.local_length(rank) for layout in tensor.layouts) for rank in range(tensor.size)]
        return tuple(held.index(lengths) for lengths in held)

    def _view(self, pipeline_rank: int, tensor_rank: int) -> RankView:
        tensor, pipeline, parameters = self.plan.tensor, self.plan.pipeline, self.profile.parameters
        if tensor is not None:
            shapes = local_shapes({p.name: p.shape for p in parameters}, tensor.layouts, tensor_rank)
            parameters = tuple(replace(p, shape=shapes[p.name]) for p in parameters)
        if pipeline is not None:
            held = pipeline.held_by(pipeline_rank)
            parameters = tuple(p for p in parameters if p.name in held)
        return RankView(
            plan=self.plan,
            profile=replace(self.profile, parameters=parameters),
            pipeline_rank=pipeline_rank,
            tensor_rank=tensor_rank,
        )
