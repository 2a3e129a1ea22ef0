"""What the user asks for (``ParallelConfig``) and what it comes to on a given world (``AxisSizes``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from lightning_pardist.base import axes
from lightning_pardist.base.errors import message

Size = int | Literal["auto"]
"""Ranks along a mesh axis; ``"auto"`` takes what the other axes leave."""

AVAILABLE_AXES = frozenset(
    {
        axes.DATA_PARALLEL_REPLICATE,
        axes.DATA_PARALLEL_SHARD,
        axes.TENSOR_PARALLEL,
        axes.PIPELINE_PARALLEL,
    }
)
"""Axes this version can spread a model over. The others have their place on the mesh and must be of size 1."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The layout a user asks for.

    Raises:
        ValueError: if a field has a value that no world could satisfy.
    """

    data_parallel_replicate_size: Size = "auto"
    """Copies of the (possibly sharded) model. ``"auto"``: one per node, or what a given shard size leaves."""
    data_parallel_shard_size: Size = "auto"
    """Ranks that share one copy. ``"auto"``: what the other axes leave."""
    tensor_parallel_size: Size = 1
    """Ranks that share the matrices inside a block. ``"auto"``: all ranks of a node; 2 if stages share one node."""
    pipeline_parallel_size: Size = 1
    """Ranks that the block stack is cut over. ``"auto"``: one per node if there are several, else one per device."""
    context_parallel_size: int = 1
    """Ranks that share one sequence."""
    expert_parallel_size: int = 1
    """Ranks that share the experts of a mixture; lies inside the data axes."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """0 replicates everything; 1 shards optimizer state and reduces gradients once per optimizer step; 2 also keeps
    gradients sharded; 3 also frees parameters after use. Master parameters are stored sharded from stage 1 on."""
    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""
    fsdp_units: tuple[str, ...] = ()
    """Class names or module name patterns that replace the derived sharding units; empty: derive them."""

    def __post_init__(self) -> None:
        for name in _SIZE_FIELDS:
            _check_size(name, getattr(self, name), auto_allowed=name in _AUTO_FIELDS)
        if self.zero_stage not in (0, 1, 2, 3) or isinstance(self.zero_stage, bool):
            raise ValueError(
                message(
                    "zero_stage must be 0, 1, 2 or 3.",
                    got=f"zero_stage={self.zero_stage!r}",
                    source="the strategy's arguments",
                    change="0 replicates, 1 shards optimizer state, 2 gradients too, 3 parameters too",
                )
            )
        self._check_available()
        self._check_zero_stage()
        self._check_kinds()

    def _check_kinds(self) -> None:
        # A text is a sequence of texts too: "Block" would be read as five patterns.
        units: object = self.fsdp_units
        if not isinstance(units, tuple) or not all(isinstance(entry, str) for entry in units):
            raise ValueError(
                message(
                    "fsdp_units must be a list of class names or module name patterns.",
                    got=f"fsdp_units={self.fsdp_units!r}",
                    source="the strategy's arguments",
                    change="write a list, such as fsdp_units=['Block'] or ['model.layers.*']",
                )
            )
        if not isinstance(self.cpu_offload, bool):
            raise ValueError(
                message(
                    "cpu_offload must be True or False.",
                    got=f"cpu_offload={self.cpu_offload!r}",
                    source="the strategy's arguments",
                    change="set cpu_offload=True or cpu_offload=False",
                )
            )

    def _check_available(self) -> None:
        asked = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_parallel_size": self.expert_parallel_size,
        }
        missing = {
            name: size for name, size in asked.items() if size != 1 and name.removesuffix("_size") not in AVAILABLE_AXES
        }
        if missing:
            raise ValueError(
                message(
                    "This version spreads a model over the data, tensor and pipeline axes; every other "
                    "axis must be of size 1.",
                    got=", ".join(f"{name}={size}" for name, size in missing.items()),
                    source="the strategy's arguments",
                    change="leave these sizes at 1 and use the sizes of the other axes",
                )
            )

    def _check_zero_stage(self) -> None:
        shard = self.data_parallel_shard_size
        if self.zero_stage == 0 and shard not in ("auto", 1):
            raise ValueError(
                message(
                    "zero_stage=0 replicates the whole model, so nothing can be sharded.",
                    got=f"zero_stage=0, data_parallel_shard_size={shard}",
                    source="the strategy's arguments",
                    change="use zero_stage=1, 2 or 3, or leave data_parallel_shard_size at 'auto'",
                )
            )
        if self.zero_stage == 0 and self.cpu_offload:
            raise ValueError(
                message(
                    "cpu_offload moves sharded state to the host, so it needs zero_stage 1, 2 or 3.",
                    got="zero_stage=0, cpu_offload=True",
                    source="the strategy's arguments",
                    change="set zero_stage=3, or cpu_offload=False",
                )
            )

    def resolve(self, *, world_size: int, num_nodes: int = 1) -> AxisSizes:
        """Returns the size of every mesh axis for ``world_size`` ranks on ``num_nodes`` nodes.

        Needs no process group, so a wrong layout is refused before any rank waits for another.

        Raises:
            ValueError: if the sizes do not multiply to ``world_size``.
        """
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if tensor == "auto":
            tensor = 2 if num_nodes == 1 and pipeline not in ("auto", 1) else world_size // num_nodes
        if pipeline == "auto":
            pipeline = num_nodes if num_nodes > 1 else world_size // self.context_parallel_size // tensor
        model_ranks = pipeline * self.context_parallel_size * tensor
        replicate, shard = self.data_parallel_replicate_size, self.data_parallel_shard_size
        if world_size % model_ranks:
            raise self._wrong_product(world_size)
        data_ranks = world_size // model_ranks
        if self.zero_stage == 0:
            shard = 1
        if replicate == "auto" and shard == "auto":
            # One replica per node: sharding traffic then stays on the links inside a node. Stages lie on whole nodes.
            replicate = math.gcd(max(num_nodes // pipeline, 1), data_ranks)
        if replicate == "auto":
            assert isinstance(shard, int)
            replicate = data_ranks // shard
        if shard == "auto":
            shard = data_ranks // replicate
        if replicate * shard != data_ranks:
            raise self._wrong_product(world_size)
        return AxisSizes(
            pipeline_parallel=pipeline,
            data_parallel_replicate=replicate,
            data_parallel_shard=shard,
            context_parallel=self.context_parallel_size,
            tensor_parallel=tensor,
        )

    def _wrong_product(self, world_size: int) -> ValueError:
        given = {name: getattr(self, name) for name in _SIZE_FIELDS if name != "expert_parallel_size"}
        product = math.prod(size for size in given.values() if isinstance(size, int))
        named = {name: size for name, size in given.items() if size != 1 or name in _AUTO_FIELDS}
        listed = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in named.items())
        stage = ", zero_stage=0 shards nothing" if self.zero_stage == 0 else ""
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        return ValueError(
            message(
                "The sizes of the mesh axes must multiply to the number of ranks.",
                got=f"{listed} (given sizes multiply to {product}{stage}) for {world_size} rank(s)",
                source="the strategy's arguments, and Trainer(devices=..., num_nodes=...) or the launcher's WORLD_SIZE",
                change=f"sizes that divide {world_size} are {fitting}; 'auto' takes what the other axes leave",
            )
        )


@dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """Ranks along every mesh axis, outer to inner."""

    pipeline_parallel: int = 1
    data_parallel_replicate: int = 1
    data_parallel_shard: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1

    def as_dict(self) -> Mapping[str, int]:
        """Returns axis name -> size in mesh order."""
        return {axis: getattr(self, axis) for axis in axes.AXES}

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.as_dict().values())

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.data_parallel_replicate * self.data_parallel_shard


_SIZE_FIELDS = tuple(field.name for field in fields(ParallelConfig) if field.name.endswith("_size"))
_AUTO_FIELDS = (
    "data_parallel_replicate_size",
    "data_parallel_shard_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


def _check_size(name: str, value: object, *, auto_allowed: bool) -> None:
    if auto_allowed and value == "auto":
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    words = "a positive integer or 'auto'" if auto_allowed else "a positive integer"
    raise ValueError(
        message(
            f"{name} must be {words}.",
            got=f"{name}={value!r}",
            source="the strategy's arguments",
            change=f"set {name} to {words}",
        )
    )
