"""What a pipeline's micro-batches log and return, as what the whole batch's step would; the same on every stage.

The user's step runs to its end on the last stage only, once per micro-batch. Its ``self.log`` calls are noted there,
joined over micro-batches as ``reduce_fx`` says (means by rows), sent to the other stages and logged once on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_pardist.base.nested import map_leaves
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.metrics import Logged, reduction_word


@dataclass
class _Call:
    """One call of ``self.log`` in one micro-batch."""

    name: str
    value: Any
    """A number, or the step value of a metric, or None if a metric has none."""
    arguments: dict[str, Any]
    rows: float
    metric: str | None
    """Name of the metric object in the module."""


@dataclass
class Joined:
    """One value of the whole batch, fit to be sent to other ranks."""

    name: str
    value: Tensor | None
    arguments: dict[str, Any]
    weight: float
    metric: str | None


@dataclass
class MicroLogs:
    """Notes the log calls of a step's micro-batches, on the last stage."""

    module: LightningModule
    calls: dict[int, list[_Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        metrics = ((child, name) for name, child in self.module.named_modules() if isinstance(child, Metric))
        self._metrics = {id(child): name for child, name in metrics}

    def note(self, micro: int, batch: Any, name: str, value: Any, arguments: dict[str, Any]) -> None:
        """Notes one call.

        Raises:
            ValueError: for a metric that is no part of the module: other stages could not know it.
        """
        metric = None
        if isinstance(value, Metric):
            metric = self._metrics.get(id(value))
            if metric is None:
                raise ValueError(f"the metric logged as {name!r} must be an attribute of the module")
            value = lightning_api.step_value(value)
        if isinstance(value, Tensor):
            value = value.detach().clone()
        rows = float(arguments.get("batch_size") or _rows(batch))
        self.calls.setdefault(micro, []).append(_Call(name, value, arguments, rows, metric))

    def joined(self) -> list[Joined]:
        """Returns one value per name (and occurrence), in the order of the first micro-batch that logged it."""
        columns: dict[tuple[str, int], list[_Call]] = {}
        for micro in sorted(self.calls):
            seen: dict[str, int] = {}
            for call in self.calls[micro]:
                seen[call.name] = seen.get(call.name, -1) + 1
                columns.setdefault((call.name, seen[call.name]), []).append(call)
        return [_join(calls) for calls in columns.values()]


def _join(calls: Sequence[_Call]) -> Joined:
    first = calls[0]
    weight = sum(call.rows for call in calls)
    numbers = [call.value for call in calls if isinstance(call.value, (Tensor, int, float))]
    value = None
    if len(numbers) == len(calls):
        value = _reduce(numbers, [call.rows for call in calls], first.arguments.get("reduce_fx", "mean"))
        value = value.cpu()
    return Joined(first.name, value, first.arguments, weight, first.metric)


def _reduce(numbers: Sequence[Any], rows: Sequence[float], reduce_fx: Any) -> Tensor:
    tensors = [n if isinstance(n, Tensor) else torch.tensor(float(n)) for n in numbers]
    if len(tensors) == 1:
        return tensors[0].reshape(())
    stacked = torch.stack([t.reshape(()).to(torch.float64) for t in tensors])
    word = reduction_word(reduce_fx)
    if word == "mean":
        weights = torch.tensor(rows, dtype=torch.float64, device=stacked.device)
        value = (stacked * weights).sum() / weights.sum()
    elif word is None:
        value = reduce_fx(stacked)  # as Lightning does with the steps of an epoch
    else:
        value = stacked.sum() if word == "sum" else stacked.max() if word == "max" else stacked.min()
    is_floating = tensors[0].is_floating_point()
    return value.to(tensors[0].dtype if is_floating or word != "mean" else torch.get_default_dtype())


def as_logged(joined: Joined, module: LightningModule, device: torch.device) -> Logged | None:
    """Returns a value to be combined over data ranks; None for what is to be logged as it is."""
    word = reduction_word(joined.arguments.get("reduce_fx", "mean"))
    if joined.value is None or word is None:
        return None
    metric = None if joined.metric is None else module.get_submodule(joined.metric)
    value = joined.value.to(device)
    value = value if value.is_floating_point() else value.float()
    assert metric is None or isinstance(metric, Metric)
    return Logged(joined.name, value, word, joined.weight, dict(joined.arguments), metric)


def local_arguments(joined: Joined, module: LightningModule, device: torch.device) -> tuple[Any, Mapping[str, Any]]:
    """Returns value and arguments for a plain ``log`` on one rank."""
    if joined.metric is not None:
        metric = module.get_submodule(joined.metric)
        assert isinstance(metric, Metric)
        if joined.value is not None:
            lightning_api.set_step_value(metric, joined.value.to(device))
        return metric, joined.arguments
    value = joined.value.to(device) if joined.value is not None else joined.value
    return value, {**joined.arguments, "batch_size": int(joined.weight)}


def to_host(value: Any) -> Any:
    """Returns a structure whose tensors lie in host memory."""
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, value)


def to_device(value: Any, device: torch.device) -> Any:
    """Returns a structure whose tensors lie on the device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


class MetricStates:
    """Gives what the last stage's metrics have counted to the same metrics of the other stages."""

    def __init__(self, module: LightningModule) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._sent: dict[str, int] = {}

    @property
    def has_any(self) -> bool:
        """True if there is anything to give."""
        return bool(self._metrics)

    def changed(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Returns the states of metrics that have counted since they were last asked for."""
        found = {}
        for name, metric in self._metrics.items():
            updates, state = lightning_api.metric_state(metric)
            if self._sent.get(name, 0) != updates or updates:
                self._sent[name] = updates
                found[name] = updates, to_host(dict(state))
        return found

    def take(self, states: Mapping[str, tuple[int, dict[str, Any]]]) -> None:
        """Makes this stage's metrics hold the given states."""
        for name, (updates, state) in states.items():
            metric = self._metrics[name]
            lightning_api.set_metric_state(metric, updates, to_device(state, torch.device(metric.device)))


def _rows(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except Exception:  # Lightning raises several kinds for batches without a clear size
        return 1
