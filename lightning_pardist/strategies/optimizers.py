"""Optimizers over a spread module: checked once, skipped together, counted for the report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_pardist.base.errors import message
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.shard_step import is_elementwise


class SkipGuard:
    """Remembers, through one accumulation window, what all ranks agreed to drop.

    A dropped micro-batch adds nothing to the gradients. If a whole window was dropped, neither the optimizer nor the
    schedulers that go with its steps move.
    """

    def __init__(self) -> None:
        self.skips_backward = False
        self._has_gradients = False
        self._step_dropped = False

    def decide(self, *, skip: bool) -> None:
        """Notes the agreement about the step that has just run forward."""
        self.skips_backward = skip
        self._step_dropped = False

    def saw_backward(self) -> None:
        """Notes that the window has gradients."""
        self._has_gradients = True

    def window_is_empty(self) -> bool:
        """Returns True if the optimizer must not step; ends the window."""
        self._step_dropped = not self._has_gradients
        self._has_gradients = False
        return self._step_dropped

    def install(self, module: LightningModule, configs: Sequence[LRSchedulerConfig]) -> Callable[[], None]:
        """Holds back per-step schedulers after a dropped step; returns a function that undoes it."""
        step = module.lr_scheduler_step
        per_step = {id(config.scheduler) for config in configs if config.interval == "step"}

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if not (self._step_dropped and id(scheduler) in per_step):
                step(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step  # type: ignore[method-assign]
        return lambda: vars(module).pop("lr_scheduler_step", None)


def watch_toggles(module: LightningModule, noticed: Callable[[], None]) -> Callable[[], None]:
    """Calls ``noticed`` after each ``toggle_optimizer`` and ``untoggle_optimizer``; returns what ends this."""
    names = ("toggle_optimizer", "untoggle_optimizer")

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def with_notice(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)
            noticed()

        return with_notice

    for name in names:
        setattr(module, name, watched(getattr(module, name)))

    def end() -> None:
        for name in names:
            vars(module).pop(name, None)

    return end


def check_optimizers(optimizers: Sequence[Optimizer], model: ParallelModel) -> None:
    """Refuses optimizers that would train something else than the spread module.

    Raises:
        ValueError: for parameters that are not the module's, or an optimizer that needs whole gradients of shards.
    """
    known = {id(parameter) for parameter in model.module.parameters()}
    for index, optimizer in enumerate(optimizers):
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if foreign and (model.kind == "shard" or model.plan.tensor is not None):
            raise ValueError(
                message(
                    "Optimizers must hold the module's parameters as they are after sharding.",
                    got=f"optimizer {index} ({type(optimizer).__name__}) holds {len(foreign)} other tensor(s), "
                    f"the first of shape {tuple(foreign[0].shape)}",
                    source="configure_optimizers",
                    change="collect parameters inside configure_optimizers (self.parameters(), "
                    "self.named_parameters()), not in __init__ or setup",
                )
            )
        if model.plan.tensor is not None and not is_elementwise(optimizer):
            raise ValueError(
                message(
                    "On a tensor axis an optimizer must treat every element alone, for a rank holds whole heads or "
                    "parts of fused weights, not equal chunks.",
                    got=f"optimizer {index} is {type(optimizer).__name__}",
                    source="configure_optimizers",
                    change="use an elementwise optimizer of torch.optim, such as AdamW or SGD, or a layout without a "
                    "tensor axis",
                )
            )
        if isinstance(optimizer, LBFGS) and (model.kind == "shard" or model.pipeline is not None):
            parts = "stages" if model.pipeline is not None else f"zero_stage={model.plan.data_parallel.zero_stage}"
            raise ValueError(
                message(
                    "LBFGS takes products over all parameters at once, which shards and stages cannot give.",
                    got=f"optimizer {index} is LBFGS, {parts}",
                    source="configure_optimizers",
                    change="use strategy='pardist_ddp' (zero_stage=0), or another optimizer",
                )
            )


def state_bytes_per_element(optimizers: Sequence[Optimizer]) -> float | None:
    """Returns the mean bytes of optimizer state per trained element, None if it cannot be told.

    Found by one step of the same class on a small tensor; classes with factored or growing state are not foretold.
    """
    total = elements = 0.0
    for optimizer in optimizers:
        numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        each = _trial(optimizer)
        if each is None:
            return None
        total += each * numel
        elements += numel
    return total / elements if elements else None


def _trial(optimizer: Optimizer) -> float | None:
    parameter = nn.Parameter(torch.zeros(4, 3))
    parameter.grad = torch.zeros_like(parameter)
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        trial = type(optimizer)([parameter], **options)
        trial.step()
    except Exception:  # any optimizer of the user's; the report then says that it does not know
        return None
    nbytes = 0
    for value in trial.state[parameter].values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            if value.shape != parameter.shape:
                return None
            nbytes += value.numel() * value.element_size()
    return nbytes / parameter.numel()
