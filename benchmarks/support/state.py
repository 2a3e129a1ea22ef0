"""Counts the bytes of training state that one rank really holds, from the storages of its live tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_pardist.torch_dist_api import fsdp_parameters
from lightning_pardist.torch_dtensor_api import local_tensor


@dataclass(frozen=True)
class LiveState:
    """Bytes on this rank, padding included."""

    parameters: int
    gradients: int
    optimizer: int
    """State with an element per parameter element."""
    counters: int
    """Optimizer state of one element per parameter tensor: Adam's step number."""
    gathered: int
    """Whole parameters that are still in memory."""

    @property
    def total(self) -> int:
        """State that lives between steps, without the counters."""
        return self.parameters + self.gradients + self.optimizer


def live_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> LiveState:
    """Returns what the rank holds now; call it after an optimizer step and before gradients are cleared."""
    parameters = list(module.parameters())
    states = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return LiveState(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=storage_bytes(value for value in states if value.ndim > 0),
        counters=storage_bytes(value for value in states if value.ndim == 0),
        gathered=storage_bytes(_gathered(module)),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes behind tensors (for DTensors: of this rank's shards), each storage once."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def _gathered(module: nn.Module) -> Iterable[Tensor]:
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        return
    for parameter in fsdp_parameters(module):
        yield from parameter.all_gather_outputs
