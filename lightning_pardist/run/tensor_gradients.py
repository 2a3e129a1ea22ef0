"""Gradients that are sums over the tensor axis: of whole parameters used on shares, of heads that several ranks hold.

All of them travel in one all-reduce per dtype and optimizer step, after the data axes are done with theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.torch_dtensor_api import UnitShard, held_by_several, local_tensor


@dataclass(frozen=True)
class _Summed:
    """A stretch of a parameter's local gradient that is summed."""

    parameter: nn.Parameter
    dim: int | None
    """None for all of it."""
    start: int
    length: int
    slot: int
    slots: int
    """Ranks with different slots hold different things; those with one slot are summed."""

    def of(self, gradient: Tensor) -> Tensor:
        """Returns the view to sum."""
        return gradient if self.dim is None else gradient.narrow(self.dim, self.start, self.length)


class PartialGradients:
    """Sums what needs to be summed, once per optimizer step."""

    def __init__(self, model: ParallelModel) -> None:
        assert model.meshes is not None and model.plan.tensor is not None
        self._group = model.meshes.tensor.get_group()
        self._rank = int(model.meshes.tensor.get_local_rank())
        self._summed = list(self._find(model))
        self._before: list[Tensor | None] | None = None

    def before_backward(self) -> None:
        """Notes, at the start of a window, what has been summed already."""
        if self._before is None:
            gradients = [self._gradient(item) for item in self._summed]
            self._before = [None if g is None else g.clone() for g in gradients]

    def end_window(self) -> None:
        """Sums what the window has added."""
        before, self._before = self._before or [None] * len(self._summed), None
        by_dtype: dict[torch.dtype, list[tuple[_Summed, Tensor, Tensor | None]]] = {}
        for item, old in zip(self._summed, before, strict=True):
            gradient = self._gradient(item)
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append((item, gradient, old))
        for entries in by_dtype.values():
            self._sum(entries)

    def _sum(self, entries: list[tuple[_Summed, Tensor, Tensor | None]]) -> None:
        total = sum(item.slots * gradient.numel() for item, gradient, _ in entries)
        flat = entries[0][1].new_zeros(total)
        places, position = [], 0
        for item, gradient, old in entries:
            start = position + item.slot * gradient.numel()
            place = flat[start : start + gradient.numel()].view(gradient.shape)
            place.copy_(gradient if old is None else gradient - old)
            places.append(place)
            position += item.slots * gradient.numel()
        dist.all_reduce(flat, group=self._group)
        for (_, gradient, old), place in zip(entries, places, strict=True):
            gradient.copy_(place if old is None else old + place)

    @staticmethod
    def _gradient(item: _Summed) -> Tensor | None:
        gradient = item.parameter.grad
        return None if gradient is None else item.of(local_tensor(gradient))

    def _find(self, model: ParallelModel) -> Iterator[_Summed]:
        plan = model.plan.tensor
        assert plan is not None
        named = dict(model.module.named_parameters())
        sharded = {layout.parameter for layout in plan.layouts}
        for name in plan.partial_parameters:
            if name in named and name not in sharded and name not in model.absent:
                yield _Summed(named[name], None, 0, 0, 0, 1)
        for layout in plan.layouts:
            if layout.parameter in model.absent:
                continue  # another pipeline stage's
            parameter = named[layout.parameter]
            unit = next((p for p in parameter.placements if isinstance(p, UnitShard)), None)  # type: ignore[attr-defined]
            for start, length, holders in held_by_several(parameter, unit) if unit is not None else ():
                slots = len(layout.stretches) // holders
                yield _Summed(parameter, layout.dim, start, length, self._rank // holders, slots)
