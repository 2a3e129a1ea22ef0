"""Every private name of Lightning that this package relies on; those around data lie in ``lightning_data_api``."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]  # re-exported
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

VERSION: str = lightning.__version__
Launcher = _Launcher
SubprocessScriptLauncher = _SubprocessScriptLauncher
ResultMetric = _ResultMetric
default_backend = _get_default_process_group_backend_for_device
distributed_is_initialized = _distributed_is_initialized
optimizers_to_device = _optimizers_to_device


def init_process_group(environment: ClusterEnvironment, backend: str, **kwargs: Any) -> None:
    """Makes the default process group unless there is one, and sees that it ends with the process.

    Lightning ends it for NCCL only; a gloo group left to the interpreter's shutdown can abort the process.
    """
    if _distributed_is_initialized():
        return
    _init_dist_connection(environment, backend, **kwargs)
    if backend != "nccl":
        atexit.register(_destroy_dist_connection)


def set_rank_zero(rank: int) -> None:
    """Tells Lightning's rank-zero helpers which rank this is; both packages keep a copy."""
    for helper in (rank_zero_only, fabric_rank_zero_only):
        setattr(helper, "rank", rank)  # noqa: B010  # an attribute that its type does not declare


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Makes the mesh available as ``self.device_mesh`` in the user's hooks, as ModelParallelStrategy does."""
    module._device_mesh = mesh


def is_compiled(module: LightningModule) -> bool:
    """Returns True if the LightningModule itself was compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return module._compiler_ctx is not None or module._compiled_call_impl is not None


def evaluation_loops(trainer: Trainer) -> Iterator[Any]:
    """Yields every loop that runs steps without gradients."""
    yield trainer.fit_loop.epoch_loop.val_loop
    yield trainer.validate_loop
    yield trainer.test_loop
    yield trainer.predict_loop


def evaluation_steps(loop: Any) -> list[int | float]:
    """Returns how many steps an evaluation loop will take on this rank: by loader, or of its loaders together."""
    batches: list[int | float] = loop.max_batches
    mode = loop._combined_loader._mode
    if mode == "sequential" or not batches:
        return batches
    return [min(batches) if mode == "min_size" else max(batches)]


def running_evaluation(trainer: Trainer) -> Any:
    """Returns the loop that validates or tests at this moment."""
    if trainer.testing:
        return trainer.test_loop
    return trainer.validate_loop if trainer.state.fn == TrainerFn.VALIDATING else trainer.fit_loop.epoch_loop.val_loop


def result_metrics(trainer: Trainer) -> dict[str, ResultMetric]:
    """Returns what ``self.log`` has collected in the running loop, by ``<hook>.<name>[.<dataloader>]``."""
    results = trainer._results
    return {} if results is None else {key: metric for key, metric in results.items() if not metric.has_reset}


def step_value(metric: Metric) -> Any:
    """Returns what a metric's last ``forward`` gave for its batch, None if it was not called."""
    return metric._forward_cache


def set_step_value(metric: Metric, value: Tensor) -> None:
    """Replaces a metric's batch value, which is what Lightning logs on a step."""
    metric._forward_cache = value  # type: ignore[assignment]  # annotated by its initial None


def metric_state(metric: Metric) -> tuple[int, dict[str, Any]]:
    """Returns how often a metric was updated, and its state."""
    return metric._update_count, metric.metric_state


def set_metric_state(metric: Metric, updates: int, state: dict[str, Any]) -> None:
    """Makes a metric hold what another one, of the same kind, has counted."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count = updates
    metric._computed = None


def has_epoch_value(metric: ResultMetric) -> bool:
    """Returns True if a logged value has been computed since it last changed."""
    return metric._computed is not None


def set_epoch_value(metric: ResultMetric, value: Tensor) -> None:
    """Stores the value that Lightning would otherwise compute from this rank's state alone."""
    metric._computed = value  # type: ignore[assignment]  # annotated by its initial None


def callbacks(trainer: Trainer) -> list[Callback]:
    """Returns the Trainer's callbacks, which it sets without declaring them."""
    return trainer.callbacks  # type: ignore[attr-defined]


def before_epoch_metrics(trainer: Trainer, fn: Callable[[], None]) -> Callable[[], None]:
    """Calls ``fn`` each time Lightning is about to compute epoch-level metrics; returns a function that ends this.

    The three methods are the only places where that happens, on all ranks alike.
    """
    connector = trainer._logger_connector
    names = ("epoch_end_reached", "update_eval_epoch_metrics", "update_train_epoch_metrics")

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def with_fn(*args: Any, **kwargs: Any) -> Any:
            fn()
            return method(*args, **kwargs)

        return with_fn

    for name in names:
        setattr(connector, name, wrap(getattr(connector, name)))

    def end() -> None:
        for name in names:
            vars(connector).pop(name, None)

    return end


def empty_cache(device: torch.device) -> None:
    """Returns cached device memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_interrupted(trainer: Trainer) -> bool:
    """Returns True while an exception ends the run: other ranks may not know of it."""
    return trainer.state.status == TrainerStatus.INTERRUPTED


def is_stand_in(optimizer: Optimizer) -> bool:
    """Returns True for what Lightning puts where ``configure_optimizers`` returned None."""
    return isinstance(optimizer, _MockOptimizer)


def overrides(module: LightningModule, hook: str) -> bool:
    """Returns True if the user's module has its own version of a hook."""
    return is_overridden(hook, module)


class TerminationWatch:
    """Notes SIGTERM without talking to other ranks, until all ranks agree in the middle of a step.

    Lightning's handler broadcasts from inside the signal handler: a rank that is in another collective at that moment
    then waits for ever. Its check at the end of a step looks at this rank's flag alone, so the flag is set on all ranks
    at once, by ``agree``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.pending = False
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._connector._sigterm_notifier_fn = self._note  # type: ignore[method-assign, assignment]

    def agree(self) -> None:
        """Makes this rank stop at the end of the running step, as all others do."""
        self._connector.received_sigterm = True

    def uninstall(self) -> None:
        """Gives Lightning its own handler back."""
        vars(self._connector).pop("_sigterm_notifier_fn", None)

    def _note(self, signum: int, _frame: Any) -> None:
        if not self.pending and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        self.pending = True
