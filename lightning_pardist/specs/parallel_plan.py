"""What will be done to a module, as data: written by ``plan``, carried out by ``apply``, printed for people."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_pardist.specs.block_levers import CompilePlan, RecomputePlan
from lightning_pardist.specs.config import AxisSizes
from lightning_pardist.specs.pipeline_plan import PipelinePlan
from lightning_pardist.specs.tensor_plan import TensorPlan

DataParallelKind = Literal["none", "replicate", "shard"]


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """Dtypes as words (``"bfloat16"``), None where nothing is changed."""

    name: str
    """Lightning's word for it, such as ``"bf16-mixed"``."""
    gather_dtype: str | None = None
    """Parameters are gathered and used in this dtype; stored in their own."""
    reduce_dtype: str | None = None
    """Gradients are reduced in this dtype."""


@dataclass(frozen=True, kw_only=True)
class ShardUnit:
    """Parameters that are gathered, freed and reduced together."""

    modules: tuple[str, ...]
    """Names of the modules whose parameters form the unit; ``""`` is the root."""
    parameters: tuple[str, ...]
    """First names of its parameters."""
    reshard_after_forward: bool
    """Free the gathered parameters after forward and gather them again in backward."""
    full_precision: bool = False
    """Exempt from a lower gather dtype (batch norm keeps running statistics in fp32 and needs weights to match)."""

    @property
    def is_root(self) -> bool:
        """True for the unit of everything that no other unit holds."""
        return self.modules == ("",)


@dataclass(frozen=True, kw_only=True)
class DataParallelPlan:
    """How the data axes hold the model."""

    kind: DataParallelKind
    """``none`` on one data rank, ``replicate`` (gradients all-reduced), ``shard`` (FSDP2, hybrid with replicas)."""
    zero_stage: int
    units: tuple[ShardUnit, ...] = ()
    """In the order of application: inner before outer, the root last."""
    scalar_parameters: tuple[str, ...] = ()
    """Parameters of no dim, which fully_shard cannot hold: kept whole on every rank, gradients averaged in one go."""
    ignored_parameters: tuple[str, ...] = ()
    """Parameters of metrics, which are left alone."""
    find_unused_parameters: bool = False
    """A trainable parameter may get no gradient, on some ranks or on all, so ranks must look for it and agree."""
    cpu_offload: bool = False
    notes: tuple[str, ...] = ()
    """What the planner decided and a reader would want to know."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of training state, padding included; gradients and parameters in their stored dtype."""

    parameters: int
    gradients: int
    optimizer: int | None
    """None if the optimizer's state cannot be foretold."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of collective on one axis, per optimizer step."""

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "send", "receive"]
    axis: str
    count: int
    nbytes: int
    """Bytes of the whole (gathered, to be reduced, or passed on) tensors, summed over the collectives."""
    members: tuple[int, ...] = ()
    """Places on the axis of those that meet; empty for all of it."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The whole plan of one run."""

    module_class: str
    sizes: AxisSizes
    precision: PrecisionPlan
    data_parallel: DataParallelPlan
    state_per_rank: StateBytes
    """Of the rank that holds most."""
    state_one_process: StateBytes
    traffic: tuple[Traffic, ...]
    tensor: TensorPlan | None = None
    """None if the tensor axis has one rank."""
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    compile: CompilePlan = field(default_factory=CompilePlan)
    pipeline: PipelinePlan | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain containers and words, fit for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def fingerprint(self) -> str:
        """Returns a short digest that differs if any part of the plan differs."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()
