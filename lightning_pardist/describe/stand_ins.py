"""What a LightningModule asks of its trainer in a step, answered without one.

Nothing here imports Lightning: the services are set on the instance (the fake copy, never the user's module), under the
public names that Lightning's documentation gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

_DEFAULTS: dict[str, Any] = {
    "global_step": 0, "current_epoch": 0, "global_rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1,
    "num_devices": 1, "num_nodes": 1, "is_global_zero": True, "max_epochs": 1, "max_steps": -1, "min_epochs": None,
    "accumulate_grad_batches": 1, "gradient_clip_val": None, "gradient_clip_algorithm": None, "precision": "32-true",
    "training": True, "validating": False, "testing": False, "predicting": False, "sanity_checking": False,
    "evaluating": False, "is_last_batch": False, "fast_dev_run": False, "num_training_batches": 1, "datamodule": None,
    "callback_metrics": {}, "logged_metrics": {}, "progress_bar_metrics": {}, "callbacks": [], "should_stop": False,
}  # fmt: skip
"""What a trainer in its first training step reports, for a module that has none."""
_TOTAL_STEPS = 1000
"""Length of the training that learning rate schedules are told: the real one would have to open the dataloaders."""


class Silence:
    """Takes every call and attribute and does nothing: a logger whose run must not hear of the fake step."""

    def __call__(self, *args: Any, **kwargs: Any) -> Silence:
        return self

    def __getattr__(self, name: str) -> Silence:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class TrainerStandIn:
    """Reads like the module's trainer (or one in its first step), and cannot act on it."""

    def __init__(self, trainer: Any | None, module: nn.Module) -> None:
        self.__dict__.update(
            real=trainer, lightning_module=module, model=module, optimizers=[], lr_scheduler_configs=[], state=None,
            logger=Silence(), loggers=[], estimated_stepping_batches=_TOTAL_STEPS,
        )  # fmt: skip

    def take(self, optimizers: list[Any]) -> None:
        """Shows these optimizers, which ``toggle_optimizer`` walks through."""
        self.__dict__["optimizers"] = optimizers

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["real"]
        if real is None:
            if name in _DEFAULTS:
                return _DEFAULTS[name]
            raise AttributeError(f"trainer.{name} is not known while the module has no trainer")
        value = getattr(real, name)
        if isinstance(value, MethodType):
            raise AttributeError(f"trainer.{name}() would act on the real trainer, so the fake run cannot call it")
        return value


def give_services(
    module: nn.Module,
    trainer: Any | None,
    backward: Callable[..., None],
    assume: Callable[[str], None],
    log: Callable[[str, Any], None] | None = None,
) -> None:
    """Gives the copy and its submodules everything in a step that Lightning would.

    Args:
        module: the copy.
        trainer: the trainer of the original, or None.
        backward: what ``manual_backward`` calls.
        assume: told when a metric's value is replaced.
        log: told what the step logs, if anybody wants to know.
    """

    def log_one(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if log is not None:
            log(name, value)

    def log_all(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log_one(name, value)

    stand_in = TrainerStandIn(trainer, module)
    optimizers = _Optimizers(module, stand_in)
    for child in module.modules():
        if isinstance(child, (Metric, MetricCollection)):
            _tolerate_values(child, assume)
        elif all(hasattr(type(child), name) for name in ("log", "manual_backward", "configure_optimizers")):
            setattr(child, "trainer", stand_in)  # noqa: B010
            _set(
                child,
                log=log_one, log_dict=log_all, print=_nothing, clip_gradients=_nothing,
                all_gather=lambda data, *args, **kwargs: data,
                manual_backward=backward,
                optimizers=optimizers.get,
                lr_schedulers=optimizers.get_schedulers,
            )  # fmt: skip


def _set(module: nn.Module, **services: Any) -> None:
    for name, service in services.items():
        if hasattr(type(module), name):
            object.__setattr__(module, name, service)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Optimizers:
    """The optimizers of ``configure_optimizers``, over fake parameters, made when first asked for."""

    def __init__(self, module: Any, trainer: TrainerStandIn) -> None:
        self._module = module
        self._trainer = trainer
        self._made: tuple[list[Any], list[Any]] | None = None

    def get(self, use_pl_optimizer: bool = True) -> Any:
        """Returns what ``LightningModule.optimizers`` does: one optimizer, or the list of them."""
        optimizers, _ = self._make()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def get_schedulers(self) -> Any:
        """Returns what ``LightningModule.lr_schedulers`` does: None, one scheduler, or the list of them."""
        _, schedulers = self._make()
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def _make(self) -> tuple[list[Any], list[Any]]:
        if self._made is None:
            optimizers, schedulers = _split(self._module.configure_optimizers())
            for optimizer in optimizers:
                _neutralise(optimizer)
            for scheduler in schedulers:
                scheduler.step = _nothing
            self._made = optimizers, schedulers
            self._trainer.take(optimizers)
        return self._made


def _split(configured: Any) -> tuple[list[Any], list[Any]]:
    """Returns optimizers and schedulers of any form that ``configure_optimizers`` may return."""
    if configured is None:
        return [], []
    if isinstance(configured, Mapping):
        configured = [configured]
    if isinstance(configured, (list, tuple)):
        if len(configured) == 2 and all(isinstance(part, (list, tuple)) for part in configured):
            return list(configured[0]), [_scheduler(entry) for entry in configured[1]]
        entries = [entry if isinstance(entry, Mapping) else {"optimizer": entry} for entry in configured]
        schedulers = [_scheduler(entry["lr_scheduler"]) for entry in entries if entry.get("lr_scheduler") is not None]
        return [entry["optimizer"] for entry in entries], schedulers
    return [configured], []


def _scheduler(entry: Any) -> Any:
    return entry["scheduler"] if isinstance(entry, Mapping) else entry


def _neutralise(optimizer: Any) -> None:
    """Makes ``step`` run the closure only, and adds what Lightning's wrapper of an optimizer has."""

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return closure() if closure is not None else None

    @contextmanager
    def toggle_model(sync_grad: bool = True) -> Iterator[None]:
        yield

    optimizer.step, optimizer.toggle_model, optimizer.optimizer = step, toggle_model, optimizer


def _tolerate_values(metric: Metric | MetricCollection, assume: Callable[[str], None]) -> None:
    """Makes a metric that looks at values (they are not there) return a number that nobody knows instead of failing."""
    for name in ("forward", "update", "compute"):
        object.__setattr__(metric, name, _or_unknown(metric, name, assume))


def _or_unknown(metric: Metric | MetricCollection, name: str, assume: Callable[[str], None]) -> Callable[..., Any]:
    method = getattr(metric, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            assume(f"{type(metric).__name__}.{name} looks at values ({type(error).__name__}): a number stood in for it")
            if name == "update":
                return None
            if isinstance(metric, MetricCollection):
                return {key: torch.zeros(()) for key in metric.keys(keep_base=False)}
            return torch.zeros(())

    return call
