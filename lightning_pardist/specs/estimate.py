"""What a run will take, foretold: values that ``pardist plan`` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from lightning_pardist.specs.device import Device
from lightning_pardist.specs.parallel_plan import ParallelPlan, Traffic

_T = TypeVar("_T")


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
    stage_buffers: int = 0
    """What a pipeline stage receives for all micro-batches of a step: hidden states, and gradients of what it sends."""
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
class RankWork:
    """What one rank of the pipeline does in a step, on the first rank of the tensor axis."""

    flops_forward: int
    flops_backward: int
    """With what is computed again."""
    flops_again: int = 0
    """Spent on recomputation."""
    activation_bytes: int | None = None
    """Kept from forward to backward at the worst moment, micro-batches of all its stages together."""
    stage_buffer_bytes: int = 0
    exchanges: tuple[Traffic, ...] = ()
    """On the tensor axis, of activations and their gradients."""
    passes: tuple[Traffic, ...] = ()
    """Hidden states and their gradients, over the cuts."""


@dataclass(frozen=True, kw_only=True)
class AxisTraffic:
    """Collectives of one kind on one axis, per optimizer step of one batch."""

    axis: str
    collective: str
    count: int
    nbytes: int
    """Bytes of the whole tensors."""
    sent_per_rank: int
    """Bytes that one rank sends, on a ring where several meet."""
    crosses_nodes: bool
    ranks: int
    """That meet."""
    seconds: float | None = None
    """At the link's peak."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A lower bound of the time of a step: nothing but peaks, everything overlapped."""

    compute_seconds: float
    """With the waiting of pipeline ranks for each other."""
    communication_seconds: float
    """Of the rank that needs most."""

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
    traffic_by_rank: tuple[tuple[AxisTraffic, ...], ...]
    """One per rank of the mesh."""
    busiest_rank: int
    """The rank that sends most."""
    work: tuple[RankWork, ...]
    """By rank of the pipeline; one entry without stages."""
    idle_share: float
    """Of the ranks' time, in which they wait for other stages: the schedule's, with the stages' FLOPs."""
    batch_rows: int | None
    device: Device | None = None
    roofline: Roofline | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def worst(self) -> MemoryTerms:
        """Terms of the rank that holds most."""
        return self.memory_by_rank[self.worst_rank]

    @property
    def seconds_per_batch(self) -> float | None:
        """The roofline's step over the batches that are trained in it: one for each data rank."""
        return None if self.roofline is None else self.roofline.seconds / self.plan.sizes.data_parallel

    @property
    def traffic(self) -> tuple[AxisTraffic, ...]:
        """Collectives of the rank that sends most."""
        return self.traffic_by_rank[self.busiest_rank]

    @property
    def most_work(self) -> RankWork:
        """Work of the pipeline rank that computes most."""
        return max(self.work, key=lambda each: each.flops_forward + each.flops_backward)

    @property
    def flops_forward(self) -> int:
        """Of one rank's batch, on the rank that computes most."""
        return self.most_work.flops_forward

    @property
    def flops_backward(self) -> int:
        """The same for the backward pass, recomputation left out."""
        return self.most_work.flops_backward - self.most_work.flops_again

    @property
    def flops_again(self) -> int:
        """Spent on recomputation there."""
        return self.most_work.flops_again

    def to_dict(self) -> dict[str, Any]:
        """Returns plain containers and words, fit for JSON; ranks of which all is the same are listed once."""
        result = asdict(replace(self, memory_by_rank=(), traffic_by_rank=()))
        result["memory_by_rank"] = [
            {**asdict(terms), "total": terms.total, "ranks": ranks}
            for terms, ranks in grouped(self.memory_by_rank).items()
        ]
        result["traffic_by_rank"] = [
            {"ranks": ranks, "traffic": [asdict(each) for each in traffic]}
            for traffic, ranks in grouped(self.traffic_by_rank).items()
        ]
        result["traffic"] = [asdict(each) for each in self.traffic]
        result |= {name: getattr(self, name) for name in ("flops_forward", "flops_backward", "flops_again")}
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


def grouped(by_rank: Sequence[_T]) -> dict[_T, list[int]]:
    """Returns what ranks have -> the ranks that have it."""
    found: dict[_T, list[int]] = {}
    for rank, value in enumerate(by_rank):
        found.setdefault(value, []).append(rank)
    return found
