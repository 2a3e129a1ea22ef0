"""Counts the collectives that really run: kind, ranks, bytes, and which code asked for them.

A dispatch mode sees every collective below the Python API, those that DistributedDataParallel starts from C++
included, so nothing has to be patched. Bytes are those of the whole tensor, as in a plan's ``Traffic``: what an
all-gather writes, what a reduce-scatter reads, what an all-reduce or broadcast holds.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from lightning_pardist.mesh import Meshes
    from lightning_pardist.specs.parallel_plan import ParallelPlan

_WHOLE_TENSOR = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::barrier": ("barrier", None),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
}
"""Collective, and which argument is the whole tensor."""
_NO_COMMUNICATION = ("_c10d_functional::wait_tensor",)
_PLUMBING = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.utils.",
    "torch._dynamo.",
    "torch._compile",
    "torch._ops",
    "contextlib",
    __name__,
)
"""Frames between a collective and the code that asked for it."""
_CONTROL = (
    "lightning.",
    "lightning_pardist.run.agree",
    "lightning_pardist.run.pipeline",
    "lightning_pardist.strategies.",
)
_STAGES = "torch.distributed.pipelining."
_CLIP = "lightning_pardist.run.clip"


@dataclass(frozen=True)
class Collective:
    """One collective of one rank."""

    kind: str
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    nbytes: int
    origin: str
    """Module whose code asked for it; ``torch.autograd.graph`` for DistributedDataParallel, which does so in C++."""

    @property
    def plane(self) -> str:
        """``data``: parameters and gradients; ``clip``: the norm; ``stages``: over cuts; ``control``: the rest."""
        if self.origin == _CLIP:
            return "clip"
        if self.origin.startswith(_STAGES):
            return "stages"
        return "control" if self.origin.startswith(_CONTROL) else "data"


class Total(NamedTuple):
    """Several collectives of one kind over the same ranks."""

    count: int
    nbytes: int


Traffic = dict[tuple[str, tuple[int, ...]], Total]
"""(kind, ranks) -> how many, how many bytes."""


class CollectiveRecorder(TorchDispatchMode):
    """Notes every collective that this thread starts inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the DTensor unwraps itself; its collectives come by afterwards
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional")) and name not in _NO_COMMUNICATION:
            self.collectives.append(_collective(name, args))
        return func(*args, **(kwargs or {}))


def totals(collectives: Iterable[Collective], plane: str) -> Traffic:
    """Returns (kind, ranks) -> count and bytes of the collectives on one plane."""
    found: dict[tuple[str, tuple[int, ...]], Total] = defaultdict(lambda: Total(0, 0))
    for c in collectives:
        if c.plane == plane:
            before = found[c.kind, c.ranks]
            found[c.kind, c.ranks] = Total(before.count + 1, before.nbytes + c.nbytes)
    return dict(found)


def control_messages(collectives: Iterable[Collective]) -> dict[str, Total]:
    """Returns "kind by module" -> count and bytes of what is not parameters, gradients or their norm."""
    found: dict[str, Total] = defaultdict(lambda: Total(0, 0))
    for c in collectives:
        if c.plane == "control":
            before = found[f"{c.kind} by {c.origin}"]
            found[f"{c.kind} by {c.origin}"] = Total(before.count + 1, before.nbytes + c.nbytes)
    return dict(found)


def planned(plan: ParallelPlan, meshes: Meshes) -> Traffic:
    """Returns what ``totals`` of the data plane must be after one step, according to the plan."""
    return {(t.collective, axis_ranks(meshes, t.axis)): Total(t.count, t.nbytes) for t in plan.traffic}


def axis_ranks(meshes: Meshes, axis: str) -> tuple[int, ...]:
    """Returns the global ranks that meet this rank on a mesh axis."""
    mesh = meshes.data_parallel if axis == "data_parallel" else meshes.world[axis]
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _collective(name: str, args: tuple[Any, ...]) -> Collective:
    # Anything not in the table must stop the count: a collective that is not counted makes it wrong in silence.
    kind, position = _WHOLE_TENSOR[name]
    nbytes = 0 if position is None else sum(t.numel() * t.element_size() for t in _tensors(args[position]))
    group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
    return Collective(kind, tuple(dist.get_process_group_ranks(group)), nbytes, _origin())


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _origin() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_PLUMBING):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""
