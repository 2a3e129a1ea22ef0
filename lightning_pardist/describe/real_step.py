"""One step of a copy of a module with real numbers; the module, its metrics and its trainer do not hear of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.base.nested import map_leaves
from lightning_pardist.describe.entries import Entry, call_entry, losses_of, trainer_of
from lightning_pardist.describe.fake_copy import Copier
from lightning_pardist.describe.stand_ins import give_services


class RealStep:
    """A copy of a module and its step."""

    def __init__(self, module: nn.Module, batch: Any, entry: Entry) -> None:
        """Copies the module and the batch.

        Args:
            module: the user's; its weights may be on meta.
            batch: what the step gets.
            entry: what to run.
        """
        trainer = trainer_of(module)
        copier = Copier()
        if trainer is not None:
            copier.stand_in(trainer, None)
        self.module: nn.Module = copier.copy(module)
        self._batch = copier.copy(batch)
        self._entry: Entry = entry
        self.logged: dict[str, Tensor] = {}
        """Numbers that the step has logged, by name."""
        give_services(self.module, trainer, self._backward, lambda _: None, self._log)

    def in_single_precision(self, device: torch.device) -> None:
        """Brings the batch to the device of the weights, and puts fp32 in place of every lower precision."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = _single(tensor.data)
        self._batch = map_leaves(
            lambda leaf: _single(leaf.to(device)) if isinstance(leaf, Tensor) else leaf, self._batch
        )

    def run(self) -> Any:
        """Returns the step's output, after its backward pass."""
        output = call_entry(self.module, self._batch, self._entry)
        if self._entry == "training_step" and not getattr(self.module, "automatic_optimization", True):
            return output
        losses = losses_of(output, only_loss=self._entry == "training_step")
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        return output

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def _log(self, name: str, value: Any) -> None:
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            self.logged[name] = torch.as_tensor(value, dtype=torch.float32).detach()


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
