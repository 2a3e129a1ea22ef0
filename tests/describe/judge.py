"""What a real step does, counted by torch's own tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_pardist.describe.flops import extra_formulas


class _Whole:
    """Counts for the whole step: torch's own tracker of modules fails where a step calls ``autograd.grad``."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@dataclass(frozen=True)
class Real:
    forward: int
    backward: int
    saved: int


def measure(module: nn.Module, step: Callable[[], Any]) -> Real:
    """Runs ``step`` for real and, if it returns a loss, its backward."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept.setdefault(address, tensor)  # alive until the end, so no address is used twice
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    counter = FlopCounterMode(display=False, custom_mapping=extra_formulas())
    counter.mod_tracker = _Whole()
    with hooks, counter:
        output = step()
        forward = counter.get_total_flops()
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if loss is not None:
            loss.backward()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return Real(forward, counter.get_total_flops() - forward, saved)
