"""Predictions: each sample once, and with ``gather_predictions=True`` all of them, in order, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import tree_flatten, tree_unflatten
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects

Batches = Sequence[Any]
Indices = Sequence[Sequence[int]]


def gather_in_order(outputs: Batches, indices: Indices, meshes: Meshes) -> list[Any]:
    """Returns the batches that one process would have predicted, on every rank.

    Args:
        outputs: what ``predict_step`` returned for each of this rank's batches; tensors and lists with one entry per
            sample, in any nesting of dicts, lists and tuples.
        indices: the dataset indices of the samples of each batch.
        meshes: every data rank must call.

    Raises:
        ValueError: on all ranks, if an output cannot be taken apart by samples.
    """
    batch_size = max((len(batch) for batch in indices), default=0)
    try:
        if len(outputs) != len(indices):
            raise _NotBySample("predictions whose sample indices are unknown")
        mine: Any = [
            pair
            for output, batch in zip(outputs, indices, strict=True)
            for pair in zip(batch, _samples(output, len(batch)), strict=True)
        ]
    except _NotBySample as error:
        mine = error
    everything = gather_objects(mine, meshes)
    for rank, part in enumerate(everything):
        if isinstance(part, _NotBySample):
            raise ValueError(
                message(
                    "gather_predictions=True needs outputs with one entry per sample.",
                    got=f"{part} (rank {rank})",
                    source="predict_step, or a data loader that does not tell its sample indices",
                    change="return tensors or lists whose first dim is the batch, or set gather_predictions=False",
                )
            )
    by_index = dict(pair for part in everything for pair in part)
    ordered = [by_index[index] for index in sorted(by_index)]
    size = max(gather_objects(batch_size, meshes))
    return [_join(ordered[start : start + size]) for start in range(0, len(ordered), size)] if size else []


class _NotBySample(Exception):
    pass


def _samples(output: Any, rows: int) -> list[Any]:
    """Takes an output apart: entry i of every tensor and list."""
    leaves, spec = tree_flatten(output, is_leaf=lambda node: _is_list_of_rows(node, rows))
    for leaf in leaves:
        if not _has_rows(leaf, rows):
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise _NotBySample(f"an output of {shape} for a batch of {rows} samples")
    return [tree_unflatten([leaf[row : row + 1] for leaf in leaves], spec) for row in range(rows)]


def _is_list_of_rows(node: Any, rows: int) -> bool:
    return isinstance(node, list) and len(node) == rows and not any(isinstance(item, Tensor) for item in node)


def _has_rows(leaf: Any, rows: int) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == rows
    return isinstance(leaf, list) and len(leaf) == rows


def _join(samples: list[Any]) -> Any:
    """Puts samples back into one batch."""
    flat = [tree_flatten(sample, is_leaf=lambda node: isinstance(node, list) and len(node) == 1) for sample in samples]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        torch.cat(column) if isinstance(column[0], Tensor) else [item for part in column for item in part]
        for column in map(list, columns)
    ]
    return tree_unflatten(joined, spec)
