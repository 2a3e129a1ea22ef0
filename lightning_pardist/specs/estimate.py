"""What a run will take, foretold: values that ``pardist plan`` prints."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_pardist.base.errors import message
from lightning_pardist.specs.parallel_plan import ParallelPlan

GIB = 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links, from the vendor's data sheet; peaks, not what a program reaches."""

    name: str
    memory_bytes: float
    flops_16: float | None = None
    """Dense FLOP/s of matrix products in bfloat16."""
    flops_32: float | None = None
    """The same in float32 (TF32 where it has it)."""
    node_bytes_per_second: float | None = None
    """One direction of the link between devices of a node."""
    network_bytes_per_second: float | None = None
    """One direction of a device's share of the network between nodes."""


DEVICES = {
    device.name: device
    for device in (
        Device(name="a100", memory_bytes=80 * GIB, flops_16=312e12, flops_32=156e12,
               node_bytes_per_second=300e9, network_bytes_per_second=25e9),
        Device(name="h100", memory_bytes=80 * GIB, flops_16=989e12, flops_32=494e12,
               node_bytes_per_second=450e9, network_bytes_per_second=50e9),
        Device(name="h200", memory_bytes=141e9, flops_16=989e12, flops_32=494e12,
               node_bytes_per_second=450e9, network_bytes_per_second=50e9),
        Device(name="b200", memory_bytes=180e9, flops_16=2250e12, flops_32=1125e12,
               node_bytes_per_second=900e9, network_bytes_per_second=50e9),
    )
}  # fmt: skip
"""SXM modules; the network is one 200 Gbit/s (A100) or 400 Gbit/s port per device."""


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


def parse_device(text: str) -> Device:
    """Returns the device that a text names: a word of the table, figures, or a word with some figures changed.

    Args:
        text: such as ``"h100"``, ``"memory=80GB"``, ``"memory=80GB,flops=989e12,node=450e9,network=50e9"`` or
            ``"h100,memory=94GB"``.

    Raises:
        ValueError: for an unknown name or figure; the message lists what there is.
    """
    name, *figures = [part.strip() for part in text.split(",")]
    if "=" in name:
        figures, device = [name, *figures], Device(name="custom", memory_bytes=0)
    elif name.lower() in DEVICES:
        device = DEVICES[name.lower()]
    else:
        raise _unknown(f"device {name!r}", text)
    fields_by_word = {
        "memory": ("memory_bytes",),
        "flops": ("flops_16", "flops_32"),
        "node": ("node_bytes_per_second",),
        "network": ("network_bytes_per_second",),
    }
    for figure in figures:
        word, _, value = figure.partition("=")
        if word not in fields_by_word:
            raise _unknown(f"figure {word!r}", text)
        number = _number(value, text)
        changed: dict[str, Any] = dict.fromkeys(fields_by_word[word], number)
        device = replace(device, **changed)
    if device.memory_bytes <= 0:
        raise _unknown("no memory", text)
    return device


def _number(text: str, whole: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)", text.strip(), flags=re.IGNORECASE)
    unit = found[2].upper() if found else ""
    if found is None or (unit and unit not in UNITS):
        raise _unknown(f"number {text!r}", whole)
    return float(found[1]) * UNITS.get(unit, 1)


def _unknown(got: str, text: str) -> ValueError:
    return ValueError(
        message(
            f"A device is one of {', '.join(DEVICES)}, or figures: memory=80GB,flops=989e12,node=450e9,network=50e9.",
            got=got,
            source=f"--device {text}",
            change="use one of these names, or give at least memory=",
        )
    )
