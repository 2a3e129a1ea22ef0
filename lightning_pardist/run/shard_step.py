"""Elementwise optimizers step on plain shards.

An optimizer such as Adam treats every element alone, so its step on the local tensors of DTensors gives the same bits
as its step on the DTensors. But every operation on a DTensor is dispatched in Python, some 15 of them per parameter,
and torch chooses its foreach kernels for plain tensors only. So, while such an optimizer updates, its groups and state
hold the shards; before and after, everybody (clipping, hooks, schedulers, checkpoints) sees the DTensors.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.base.torch_api import has_step_post_hooks
from lightning_pardist.torch_dtensor_api import UnitShard, as_dtensor, local_tensor

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Exactly these classes: a subclass may look at whole tensors."""
_PER_PARAMETER = ("step", "mu_product")
"""State of these optimizers that is one number per parameter tensor and a plain tensor in either form."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is known to treat every element alone."""
    return type(optimizer) in _ELEMENTWISE


class ShardStep:
    """Shows an optimizer its shards from ``show`` until the end of the context."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._pairs: list[tuple[DTensor, nn.Parameter]] = []
        self._groups: list[list[Tensor]] = []

    def show(self) -> None:
        """Puts shards in the place of DTensors, unless whole tensors might be looked at; costs no copy."""
        optimizer = self._optimizer
        # Hooks after the step see what the step updates; units of the tensor axis it can update as shards only.
        looks_at_whole = has_step_post_hooks(optimizer) and not self._has_units()
        if not is_elementwise(optimizer) or looks_at_whole:
            return
        for group in optimizer.param_groups:
            parameters = group["params"]
            self._groups.append(list(parameters))
            parameters[:] = [self._shard(p) if isinstance(p, DTensor) else p for p in parameters]

    def _has_units(self) -> bool:
        """Returns whether a parameter is sharded in a way that DTensor's operators do not know."""
        listed = (p for group in self._optimizer.param_groups for p in group["params"])
        return any(isinstance(placed, UnitShard) for p in listed for placed in getattr(p, "placements", ()))

    def __enter__(self) -> ShardStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=False):
            group["params"][:] = parameters
        for whole, shard in self._pairs:
            state = self._optimizer.state.pop(shard, None)
            if state:
                self._optimizer.state[whole] = _of_whole(state, whole, self._optimizer.state.get(whole, {}))
        self._pairs, self._groups = [], []

    def _shard(self, whole: DTensor) -> nn.Parameter:
        shard = nn.Parameter(local_tensor(whole).detach(), requires_grad=whole.requires_grad)
        if whole.grad is not None:
            shard.grad = local_tensor(whole.grad)
        if whole in self._optimizer.state:
            state = self._optimizer.state[whole]
            self._optimizer.state[shard] = {key: _local(value) for key, value in state.items()}
        self._pairs.append((whole, shard))
        return shard


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, Tensor) else value


def _of_whole(state: dict[str, Any], whole: DTensor, before: dict[str, Any]) -> dict[str, Any]:
    """Returns the state as the step would have left it on the DTensor; what was updated in place keeps its object."""
    result = {}
    for key, value in state.items():
        if _local(before.get(key)) is value:
            result[key] = before[key]
        elif isinstance(value, Tensor) and key not in _PER_PARAMETER:
            result[key] = as_dtensor(value, whole)
        else:
            result[key] = value
    return result
