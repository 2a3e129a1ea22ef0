"""How fast a run is: samples, tokens and FLOP/s over all ranks, model FLOP/s utilisation, memory.

The name differs from Lightning's ``ThroughputMonitor``, which multiplies rank 0's figures by the number of ranks and
takes FLOPs from an attribute of the user's module. Here rows and tokens are counted on every rank that reads its own
samples, and FLOPs come from the profile the plan was made from.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pardist.base.errors import message
from lightning_pardist.describe.named_tensors import named_tensors
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.specs.model_profile import ModelProfile

PREFIX = "throughput/"
_COMPUTE_DTYPES = {
    "64-true": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank did between two reports."""

    data_rank: int
    """Its share of the samples; ranks with equal numbers read the same ones."""
    steps: int
    """Optimizer steps."""
    seconds: float
    rows: int
    tokens: int | None
    """None if the batch shows none (no 2-D tensor of integers)."""
    flops: float | None
    """Of the whole model for these rows, forward and backward; None without a profile of a run."""
    peak_memory_bytes: int


class ParallelThroughput(Callback):
    """Reports the speed and memory of training every few optimizer steps, to the loggers and the progress bar.

    Logged under ``throughput/``, each one number for the whole run:

    - ``samples_per_second``, ``tokens_per_second`` (padding counts), ``seconds_per_step``;
    - ``flops_per_second`` and ``flops_per_step``: the model's FLOPs, forward and backward, without recomputation;
    - ``mfu``: ``flops_per_second`` over the peak of all devices, if the peak is known;
    - ``peak_memory_bytes``: of the rank that held most. On the host, the process's peak resident set.

    Validation does not count, the first step neither (it allocates and builds). The device is waited for only when
    reporting, after the first step, and around validation; ranks exchange their counts only when reporting.

    Args:
        every_n_steps: optimizer steps between reports.
        peak_flops: peak dense FLOP/s of one device at the run's precision. None takes Lightning's table, which knows
            many NVIDIA devices and Cloud TPUs but gives figures with sparsity for some of them; without an entry there
            is no ``mfu``.
        prog_bar: show tokens (or samples) per second and ``mfu`` in the progress bar.

    Raises:
        ValueError: if an argument is not positive, or the strategy is not one of this package's.
    """

    def __init__(self, every_n_steps: int = 50, peak_flops: float | None = None, prog_bar: bool = True) -> None:
        super().__init__()
        _check_positive(every_n_steps=every_n_steps, peak_flops=peak_flops)
        self._every_n_steps = every_n_steps
        self._peak_flops = peak_flops
        self._prog_bar = prog_bar
        self._count = _Count()
        self.last_report: dict[str, float] = {}
        """The figures reported last, without the prefix."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "parallel_model"):
            raise ValueError(
                message(
                    "ParallelThroughput counts by the plan and profile of a lightning_pardist strategy.",
                    got=type(trainer.strategy).__name__,
                    source="Trainer(strategy=...)",
                    change="use a pardist_* strategy, or Lightning's own ThroughputMonitor",
                )
            )
        if stage == "fit" and self._peak_flops is None and trainer.strategy.root_device.type != "cpu":
            dtype = _COMPUTE_DTYPES.get(str(trainer.precision), torch.float32)
            self._peak_flops = get_available_flops(trainer.strategy.root_device, dtype)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count = _Count()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        count, step = self._count, trainer.global_step
        count.add(batch)
        if count.first_step is None:
            if step > 0:  # with accumulation, the first step ends a few batches later
                self._begin(trainer, step)
            return
        if step - count.first_step >= self._every_n_steps:
            self._report(trainer, pl_module)
            self._begin(trainer, step)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._count.running:
            _wait_for(trainer.strategy.root_device)
            self._count.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._count.first_step is not None and not self._count.running:
            _wait_for(trainer.strategy.root_device)
            self._count.resume()

    def _begin(self, trainer: Trainer, step: int) -> None:
        _wait_for(trainer.strategy.root_device)
        self._count = _Count(first_step=step)
        self._count.resume()

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = _parallel_model(trainer)
        _wait_for(trainer.strategy.root_device)
        self._count.pause()
        mine = self._count.window(trainer, model)
        windows = gather_objects(mine, model.meshes)
        self.last_report = report(windows, self._peak_flops)
        logged = {PREFIX + name: value for name, value in self.last_report.items()}
        # The loggers directly: self.log would repeat a value that is only set now and then at every logging step.
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)
        rate = "tokens_per_second" if "tokens_per_second" in self.last_report else "samples_per_second"
        shown = [rate] + (["mfu"] if "mfu" in self.last_report else [])
        for name in shown if self._prog_bar else []:
            pl_module.log(PREFIX + name, logged[PREFIX + name], prog_bar=True, logger=False)


def report(windows: Sequence[Window], peak_flops: float | None) -> dict[str, float]:
    """Returns the figures of the whole run from the windows of all its ranks.

    Args:
        windows: one per rank, over the same optimizer steps.
        peak_flops: FLOP/s of one device, None if unknown.
    """
    shares = {window.data_rank: window for window in windows}.values()  # ranks that share a batch count once
    seconds = max(window.seconds for window in windows)
    steps = windows[0].steps
    figures: dict[str, float] = {
        "seconds_per_step": seconds / steps,
        "samples_per_second": sum(window.rows for window in shares) / seconds,
    }
    tokens = [window.tokens for window in shares]
    if None not in tokens:
        figures["tokens_per_second"] = sum(filter(None, tokens)) / seconds
    flops = [window.flops for window in shares]
    if None not in flops:
        total = sum(filter(None, flops))
        figures["flops_per_step"] = total / steps
        figures["flops_per_second"] = total / seconds
        if peak_flops:
            figures["mfu"] = total / seconds / (peak_flops * len(windows))
    figures["peak_memory_bytes"] = float(max(window.peak_memory_bytes for window in windows))
    return figures


def rows_and_tokens(batch: Any) -> tuple[int, int | None]:
    """Returns rows (dim 0 of the first tensor that has one) and tokens (size of the first 2-D integer tensor).

    The rule by which ``ModelProfile.batch_rows`` and ``batch_tokens`` are found, so that one scales the other.
    """
    tensors = [tensor for _, tensor in named_tensors(batch)]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), 1)
    integers = next((tensor for tensor in tensors if not tensor.dtype.is_floating_point), None)
    tokens = integers.numel() if integers is not None and integers.dim() == 2 else None
    return rows, tokens


def step_flops(profile: ModelProfile | None, rows: int, tokens: int | None) -> float | None:
    """Returns forward and backward FLOPs for that many rows, None if no run was profiled.

    Scaled from the profiled batch by tokens, or by rows where there are none. Exact while sequences keep the length of
    the profiled batch; attention's share grows with the square of the length and is then scaled too little.
    """
    if profile is None or profile.source != "fake_run":
        return None
    total = profile.flops_forward + profile.flops_backward
    if tokens is not None and profile.batch_tokens:
        return total * tokens / profile.batch_tokens
    return total * rows / profile.batch_rows if profile.batch_rows else None


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory this rank has held: allocated on the device, or resident on the host."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@dataclass
class _Count:
    """What this rank has done since the last report."""

    first_step: int | None = None
    """Optimizer steps at the start of the window; None before the first one has ended."""
    rows: int = 0
    tokens: int | None = 0
    seconds: float = 0.0
    """Measured up to ``started``."""
    started: float | None = None
    """When the clock was last set going; None while it stands."""

    @property
    def running(self) -> bool:
        return self.started is not None

    def add(self, batch: Any) -> None:
        rows, tokens = rows_and_tokens(batch)
        self.rows += rows
        self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens

    def resume(self) -> None:
        self.started = time.perf_counter()

    def pause(self) -> None:
        assert self.started is not None
        self.seconds += time.perf_counter() - self.started
        self.started = None

    def window(self, trainer: Trainer, model: ParallelModel) -> Window:
        assert self.first_step is not None
        return Window(
            data_rank=model.meshes.data_parallel_rank if model.meshes else 0,
            steps=trainer.global_step - self.first_step,
            seconds=self.seconds,
            rows=self.rows,
            tokens=self.tokens,
            flops=step_flops(model.profile, self.rows, self.tokens),
            peak_memory_bytes=peak_memory_bytes(trainer.strategy.root_device),
        )


def _parallel_model(trainer: Trainer) -> ParallelModel:
    # By name: callbacks and strategies are neighbours that do not import each other.
    model: ParallelModel | None = getattr(trainer.strategy, "parallel_model", None)
    assert model is not None
    return model


def _wait_for(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(
                message(
                    f"{name} must be positive.",
                    got=f"{name}={value!r}",
                    source="the arguments of ParallelThroughput",
                    change="every_n_steps counts optimizer steps, peak_flops is FLOP/s of one device",
                )
            )
