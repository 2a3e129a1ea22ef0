"""How much each micro-batch's loss counts in the batch's.

A mean over samples is the row-weighted mean of its parts. A mean over tokens of which some are ignored is not: there
parts count by the labels that count. (Plain gradient accumulation weighs batches equally in either case.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.specs.pipeline_options import PipelineOptions


def loss_weights(options: PipelineOptions, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Returns one weight per part; they add up to one.

    Raises:
        ValueError: if the labels that weights are counted by are not in the batch.
    """
    if options.loss_weight == "rows":
        counts = [float(size) for size in sizes]
    else:
        counts = [_counting(options, part) for part in parts]
    total = sum(counts)
    return [count / total for count in counts] if total else [1.0 / len(counts)] * len(counts)


def _counting(options: PipelineOptions, part: Any) -> float:
    labels = _at(part, options.labels.split("."))
    if not isinstance(labels, Tensor):
        raise ValueError(
            message(
                "PipelineOptions(loss_weight='tokens') counts the labels of every micro-batch.",
                got=f"labels={options.labels!r}, but there is no tensor at that path of the batch",
                source="the strategy's argument pipeline, and the data loader",
                change="give the path of the labels: a key ('labels'), a position ('1') or several ('text.labels')",
            )
        )
    if options.shifted_labels:
        labels = labels[:, 1:]
    return float((labels != options.ignore_index).sum())


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, (list, tuple)) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = getattr(value, key, None)
    return value
