"""How one step of a module is called, and what backward starts from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from lightning_pardist.describe.named_tensors import named_tensors

Entry = Literal["training_step", "forward"]


def call_entry(module: Any, batch: Any, entry: Entry) -> Any:
    """Returns what one step of the module gives, with its own hooks around the move of a batch to the device."""
    if entry == "training_step":
        batch = _transferred(module, batch)
        takes_index = _takes_index(module.training_step)
        return module.training_step(batch, 0) if takes_index else module.training_step(batch)
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)


def trainer_of(module: nn.Module) -> Any | None:
    """Returns the module's trainer, if it has one."""
    try:
        return getattr(module, "trainer", None)
    except RuntimeError:  # Lightning's way of saying that there is none
        return None


def _transferred(module: Any, batch: Any) -> Any:
    """Returns the batch after the module's own hooks around the move to the device."""
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if callable(getattr(module, hook, None)):
            batch = getattr(module, hook)(batch, 0)
    return batch


def _takes_index(training_step: Any) -> bool:
    parameters = [
        parameter
        for parameter in inspect.signature(training_step).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def losses_of(output: Any, *, only_loss: bool) -> list[torch.Tensor]:
    """Returns the tensors that backward starts from: the loss, or every output when a forward has none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if only_loss and isinstance(output, torch.Tensor):
        loss = output
    if isinstance(loss, torch.Tensor):
        candidates = [loss]
    elif only_loss:
        candidates = []
    else:
        candidates = [tensor for _, tensor in named_tensors(output)]
    return [tensor for tensor in candidates if tensor.requires_grad]
