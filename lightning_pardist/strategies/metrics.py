"""What ``self.log`` means on many ranks: every value is the one that one process with the whole batch would log.

Two kinds of values, two moments:

- in ``training_step`` values are wanted at once (progress bar, loggers, callbacks). They are noted while the step
  runs, combined over the data ranks in one collective at its end, and then logged: all ranks log the same numbers;
- everywhere else values add up on each rank and are combined when Lightning is about to compute epoch-level metrics.

Means are weighted by rows. Names are agreed on first: ranks may log different names (a branch on data) without a hang.
A torchmetrics object synchronises itself at the end of the epoch; its step value is the row-weighted mean over ranks.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.strategies import lightning_api

Reduction = Literal["mean", "sum", "max", "min"]

Sink = Callable[[str, Any, dict[str, Any]], None]
"""Takes a call of ``self.log``: name, value, the other arguments."""

_SIGNATURE = inspect.signature(LightningModule.log)
_STEP_HOOKS = ("step", "_batch_start", "_batch_end", "backward", "zero_grad", "optimizer_step")


@dataclass
class Logged:
    """One call of ``self.log`` in a training step."""

    name: str
    value: Tensor
    """Scalar on this rank; for a metric its step value."""
    reduction: Reduction
    weight: float
    """Rows behind the value on this rank."""
    arguments: dict[str, Any]
    """The other arguments of the call."""
    metric: Metric | None = None
    stands_in: bool = False
    """A metric object that only other ranks logged: takes part in the collective, is not logged here."""


class StepLogs:
    """Notes the log calls of one training step and replays them with values of the whole batch."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._log = module.log
        self._noted: list[Logged] | None = None
        self._batch: Any = None
        self._is_silent = False
        self._sink: Sink | None = None
        module.log = self._intercept  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Gives the module its own ``log`` back."""
        vars(self._module).pop("log", None)

    @contextmanager
    def noting(self, batch: Any) -> Iterator[list[Logged]]:
        """Collects the calls made inside the context instead of logging them."""
        self._noted, self._batch = [], batch
        try:
            yield self._noted
        finally:
            self._noted, self._batch = None, None

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Drops the calls made inside the context."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    @contextmanager
    def handing_over(self, sink: Sink) -> Iterator[None]:
        """Gives the calls made inside the context to ``sink`` instead of logging them."""
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def log_here(self, name: str, value: Any, arguments: Mapping[str, Any]) -> None:
        """Logs a value as Lightning does, on this rank alone."""
        self._log(name, value, **arguments)

    def replay(self, calls: Sequence[Logged], meshes: Meshes, device: torch.device, *, same_names: bool) -> None:
        """Combines the values over the data ranks and logs them on every rank.

        Args:
            calls: what ``noting`` collected on this rank.
            meshes: every data rank must call.
            device: where the values are reduced.
            same_names: all ranks noted the same names in the same order, as agreed beforehand.
        """
        aligned = list(calls) if same_names else _align(calls, meshes)
        if not aligned:
            return
        values, weights = combine(
            [c.value for c in aligned],
            [c.weight for c in aligned],
            [c.reduction for c in aligned],
            (meshes, device),
        )
        for call, value, weight in zip(aligned, values, weights, strict=True):
            if not call.stands_in:
                self._log_global(call, value, weight)

    def _log_global(self, call: Logged, value: Tensor, weight: Tensor) -> None:
        arguments = {**call.arguments, "sync_dist": False, "batch_size": weight}
        if call.metric is None:
            self._log(call.name, value.to(call.value.dtype), **arguments)
            return
        # A metric object computes its own epoch value; only the step value is replaced.
        lightning_api.set_step_value(call.metric, value.to(call.value.dtype))
        arguments.pop("batch_size")
        self._log(call.name, call.metric, **arguments)

    def _intercept(self, *args: Any, **kwargs: Any) -> None:
        if self._is_silent:
            return
        bound = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        bound.pop("self")
        name, value = bound.pop("name"), bound.pop("value")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if self._sink is not None:
            self._sink(name, value, bound)
            return
        local_only = bound.get("rank_zero_only") or bound.get("sync_dist_group") is not None
        noted = None if self._noted is None or local_only else self._note(name, value, bound)
        if noted is None:
            self._log(name, value, **bound)
        else:
            assert self._noted is not None
            self._noted.append(noted)

    def _note(self, name: str, value: Any, arguments: dict[str, Any]) -> Logged | None:
        metric = value if isinstance(value, Metric) else None
        number = lightning_api.step_value(metric) if metric is not None else value
        reduction = reduction_word(arguments.get("reduce_fx", "mean"))
        if metric is not None and not isinstance(number, Tensor):
            return None
        if not isinstance(number, (Tensor, int, float)) or reduction is None:
            return None
        tensor = number.detach().clone() if isinstance(number, Tensor) else torch.tensor(float(number))
        if tensor.numel() != 1:
            return None
        weight = arguments.get("batch_size") or self._rows()
        if not tensor.is_floating_point():
            tensor = tensor.float()
        return Logged(name, tensor.reshape(()), reduction, float(weight), arguments, metric)

    def _rows(self) -> int:
        try:
            return int(extract_batch_size(self._batch))
        except Exception:  # Lightning raises several kinds for batches without a clear size
            return 1


def names_digest(calls: Sequence[Logged]) -> int:
    """Returns a number that differs if the names or their order differ; never zero for a call."""
    return zlib.crc32("\n".join(f"{c.name} {c.reduction}" for c in calls).encode()) if calls else 0


def sync_epoch_metrics(trainer: Trainer, meshes: Meshes, device: torch.device) -> None:
    """Combines what every rank has added up since the last reset and stores the results as computed values."""
    waiting = {key: metric for key, metric in lightning_api.result_metrics(trainer).items() if _waits_for_sync(metric)}
    keys = gather_objects(list(waiting), meshes)
    common = [key for key in keys[0] if all(key in other for other in keys)]
    for key in [key for key in waiting if key not in common or not _combines(waiting[key])]:
        waiting[key].compute()
    chosen = [key for key in common if _combines(waiting[key])]
    if not chosen:
        return
    metrics = [waiting[key] for key in chosen]
    weights = [m.cumulated_batch_size if m.meta.is_mean_reduction else torch.ones(()) for m in metrics]
    # A mean's state is a weighted sum already, so both of its halves are plain sums.
    sums = [_state_reduction(m) for m in metrics]
    states, _ = combine([m.value for m in metrics], [1.0] * len(metrics), sums, (meshes, device))
    totals, _ = combine(weights, [1.0] * len(metrics), ["sum"] * len(metrics), (meshes, device))
    for metric, state, total in zip(metrics, states, totals, strict=True):
        value = state / total if metric.meta.is_mean_reduction else state
        lightning_api.set_epoch_value(metric, value.to(dtype=metric.value.dtype, device=metric.value.device))


def combine(
    values: Sequence[Tensor],
    weights: Sequence[float],
    reductions: Sequence[Reduction],
    where: tuple[Meshes, torch.device],
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns every value reduced over the data ranks, and the summed weights, in at most two collectives.

    Args:
        values: scalars; the same number and order on all data ranks.
        weights: rows behind each value on this rank; only means look at them, 0 leaves a rank out.
        reductions: how each is reduced.
        where: the meshes, and the device on which to reduce.
    """
    meshes, device = where
    group = meshes.data_parallel_group
    local = torch.stack([v.detach().to(device=device, dtype=torch.float64).reshape(()) for v in values])
    rows = torch.tensor(list(weights), dtype=torch.float64).to(device)
    is_mean = torch.tensor([r == "mean" for r in reductions], device=device)
    # A rank without rows may hold anything, NaN included: it must not enter the sum.
    weighted = torch.where(rows > 0, torch.where(is_mean, local * rows, local), torch.zeros_like(local))
    sums = torch.stack([weighted, rows])
    dist.all_reduce(sums, group=group)
    result = torch.where(is_mean, sums[0] / sums[1], sums[0])
    extremes = [i for i, r in enumerate(reductions) if r in ("max", "min")]
    if extremes:
        signs = torch.tensor([1.0 if reductions[i] == "max" else -1.0 for i in extremes], dtype=torch.float64)
        signs = signs.to(device)
        candidates = torch.where(rows[extremes] > 0, local[extremes] * signs, float("-inf"))
        dist.all_reduce(candidates, op=dist.ReduceOp.MAX, group=group)
        result[extremes] = candidates * signs
    return list(result), [w.to(torch.int64) for w in sums[1]]


def _align(calls: Sequence[Logged], meshes: Meshes) -> list[Logged]:
    """Returns one entry per name that any rank logged, in rank order; names this rank did not log weigh nothing."""
    by_key = {(c.name, n): c for c, n in _occurrences(calls)}
    tables = gather_objects(
        [(c.name, n, c.reduction, c.arguments, c.metric is not None) for c, n in _occurrences(calls)], meshes
    )
    aligned: dict[tuple[str, int], Logged] = {}
    for table in tables:
        for name, occurrence, reduction, arguments, is_metric in table:
            key = (name, occurrence)
            if key in aligned:
                continue
            if key in by_key:
                aligned[key] = by_key[key]
            else:
                aligned[key] = Logged(name, torch.zeros(()), reduction, 0.0, arguments, stands_in=is_metric)
    return list(aligned.values())


def _occurrences(calls: Sequence[Logged]) -> Iterator[tuple[Logged, int]]:
    seen: dict[str, int] = {}
    for call in calls:
        seen[call.name] = seen.get(call.name, -1) + 1
        yield call, seen[call.name]


def _waits_for_sync(metric: lightning_api.ResultMetric) -> bool:
    open_value = metric.is_tensor and metric.meta.on_epoch and not lightning_api.has_epoch_value(metric)
    return bool(open_value) and not metric.meta.sync.should


def _combines(metric: lightning_api.ResultMetric) -> bool:
    """Values of training_step are global already; a sum logged once per epoch may be, so it is left as it is."""
    hook = metric.meta.fx.split(".")[0]
    if hook == "training_step":
        return False
    return not metric.meta.is_sum_reduction or hook.endswith(_STEP_HOOKS)


def _state_reduction(metric: lightning_api.ResultMetric) -> Reduction:
    reduction = "sum" if metric.meta.is_mean_reduction else reduction_word(metric.meta.reduce_fx)
    assert reduction is not None, metric.meta.reduce_fx
    return reduction


def reduction_word(reduce_fx: Any) -> Reduction | None:
    """Returns the word for what ``reduce_fx`` of ``self.log`` does; None for a function of the user's own."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name = {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)
    return cast(Reduction, name) if name in ("mean", "sum", "max", "min") else None
