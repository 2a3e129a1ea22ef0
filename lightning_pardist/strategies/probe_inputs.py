"""Made-up inputs for a module that is tried alone: of the observed kinds, and of sizes that take little time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.nested import map_arguments
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.specs.tensor_roles import RegionProbe, TensorLeaf

_LONGEST = 64
"""Rows and positions that a module is tried with, if it takes fewer than it was seen with."""


@dataclass(frozen=True)
class MadeUp:
    """What the module is called with."""

    probe: RegionProbe
    device: torch.device
    masks: bool = True
    """True means "attend" to some code, "leave out" to other."""
    numbers: int = 2
    """Whole numbers are made below this."""

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Returns arguments, keyword arguments, and those of the tensors in them that need a gradient."""
        leaves: list[Tensor] = []
        args = tuple(self._filled(item, leaves) for item in self.probe.args)
        kwargs = {key: self._filled(item, leaves) for key, item in self.probe.kwargs.items()}
        return args, kwargs, leaves

    def _filled(self, value: Any, leaves: list[Tensor]) -> Any:
        if isinstance(value, TensorLeaf):
            dtype = dtype_from_word(value.dtype)
            if dtype == torch.bool:
                return torch.full(value.shape, self.masks, device=self.device)
            if not dtype.is_floating_point:
                counted = torch.arange(math.prod(value.shape), device=self.device)
                return counted.remainder(self.numbers).view(value.shape).to(dtype)
            made = torch.randn(value.shape, device=self.device)
            if value.requires_grad:
                leaves.append(made.requires_grad_())
            return made
        if type(value) in (tuple, list):
            return type(value)(self._filled(item, leaves) for item in value)
        if isinstance(value, Mapping):
            return {key: self._filled(item, leaves) for key, item in value.items()}
        return value


def candidates(probe: RegionProbe, device: torch.device) -> Iterator[MadeUp]:
    """Yields inputs to try one after another, until a module gives numbers for some: short ones first."""
    short = _shortened(probe)
    for each in (short, probe) if short != probe else (probe,):
        yield MadeUp(each, device)
        yield MadeUp(each, device, masks=False)
        yield MadeUp(each, device, numbers=1)


def _shortened(probe: RegionProbe) -> RegionProbe:
    """Returns the call with fewer rows and positions, wherever their numbers are found in its tensors."""
    hidden = next((leaf for leaf in _leaves((probe.args, probe.kwargs)) if leaf.requires_grad), None)
    if hidden is None:
        return probe
    outer = hidden.shape[:2] if len(hidden.shape) == 3 else hidden.shape[:1]
    shorter = {size: _LONGEST + size % 2 for size in outer if size > _LONGEST + 1}

    def shorten(value: Any) -> Any:
        if not isinstance(value, TensorLeaf) or not value.shape:
            return value
        shape = [shorter.get(size, size) for size in value.shape]
        # The last dim of numbers is features, whatever their number, except in masks over positions and positions.
        is_mask = len(shape) >= 2 and value.shape[-1] == value.shape[-2] and not value.requires_grad
        if dtype_from_word(value.dtype).is_floating_point and len(shape) >= 2 and not is_mask:
            shape[-1] = value.shape[-1]
        return replace(value, shape=tuple(shape))

    return replace(probe, args=map_arguments(shorten, probe.args), kwargs=map_arguments(shorten, probe.kwargs))


def _leaves(value: Any) -> Iterator[TensorLeaf]:
    if isinstance(value, TensorLeaf):
        if dtype_from_word(value.dtype).is_floating_point:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
