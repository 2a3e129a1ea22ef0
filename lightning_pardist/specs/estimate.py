"""What a run will take, foretold: values that ``pardist plan`` prints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_pardist.specs.device import Device
from lightning_pardist.specs.parallel_plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Bytes on one rank's device at the worst moment of a step, and on its host."""

    parameters: int
    gradients: int
    optimizer: int | None
    """None if the optimizer's state cannot be foretold."""
    activations: int | None
    """None if no run on fake tensors told them."""
    gather_buffers: int
    buffers: int
    host: int = 0
    """Parameters, gradients and optimizer state that live in host memory."""

    @property
    def total(self) -> int:
        """Bytes on the device; unknown terms count as nothing."""
        on_device = (getattr(self, field.name) or 0 for field in fields(self) if field.name != "host")
        return sum(on_device)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the terms that are not known."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) is None)


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """Collectives of one kind on one axis, per optimizer step of one micro-batch."""

    axis: str
    collective: str
    count: int
    nbytes: int
    """Bytes of the whole tensors."""
    sent_per_rank: int
    """Bytes that one rank sends on a ring."""
    crosses_nodes: bool
    seconds: float | None = None
    """At the link's peak."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A lower bound of the time of a step: nothing but peaks, everything overlapped."""

    compute_seconds: float
    communication_seconds: float

    @property
    def seconds(self) -> float:
        """The larger of the two: what no implementation can beat."""
        return max(self.compute_seconds, self.communication_seconds)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One layout, foretold."""

    plan: ParallelPlan
    world_size: int
    num_nodes: int
    memory_by_rank: tuple[MemoryTerms, ...]
    """One per rank of the mesh."""
    worst_rank: int
    traffic: tuple[AxisTraffic, ...]
    flops_forward: int
    """Of one rank's batch."""
    flops_backward: int
    flops_again: int
    """Spent on recomputation."""
    batch_rows: int | None
    device: Device | None = None
    roofline: Roofline | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def worst(self) -> MemoryTerms:
        """Terms of the rank that holds most."""
        return self.memory_by_rank[self.worst_rank]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain containers and words, fit for JSON; ranks that hold the same are listed once."""
        groups: dict[MemoryTerms, list[int]] = {}
        for rank, terms in enumerate(self.memory_by_rank):
            groups.setdefault(terms, []).append(rank)
        result = asdict(replace(self, memory_by_rank=()))
        result["memory_by_rank"] = [
            {**asdict(terms), "total": terms.total, "ranks": ranks} for terms, ranks in groups.items()
        ]
        return result

    def to_json(self) -> str:
        """Returns the estimate as JSON text."""
        return json.dumps(self.to_dict(), indent=2)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that was tried."""

    layout: str
    """In words, such as ``"fsdp 64, recompute full"``."""
    arguments: dict[str, Any]
    """Arguments of HybridStrategy that ask for it."""
    estimate: Estimate | None
    rejected: str | None = None
    """Why it will not do; None if it fits."""
