"""A batch of any structure in parts, and what the parts' steps return as what the whole batch's would.

Rows are found by size: a tensor whose first dim has the batch's number of rows is cut along it, a list of that length
is cut too (texts, targets of each image), and everything else goes to every part as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pardist.base.errors import message
from lightning_pardist.base.nested import children, leaves, map_leaves, rebuild


def batch_rows(batch: Any) -> int | None:
    """Returns the number of samples: dim 0 of the first tensor that has one, else the length of the first list."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, (list, tuple)) and batch else None


def even_sizes(rows: int, parts: int) -> list[int]:
    """Returns the rows of every part; the first ones have one more if they do not divide evenly."""
    least, more = divmod(rows, parts)
    return [least + (part < more) for part in range(parts)]


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns the parts of a batch, views where it can.

    Args:
        batch: any nesting of containers.
        sizes: rows of every part.

    Raises:
        ValueError: for contents that cannot be cut by rows.
    """
    if len(sizes) == 1:
        return [batch]
    return _split(batch, sum(sizes), sizes)


def _split(value: Any, rows: int, sizes: Sequence[int]) -> list[Any]:
    if isinstance(value, PackedSequence):
        raise _cannot_cut("a PackedSequence")
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise _cannot_cut("a nested or sparse tensor")
        by_rows = value.dim() > 0 and value.shape[0] == rows
        return list(value.split(list(sizes))) if by_rows else [value] * len(sizes)
    if _is_row_list(value, rows):
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return [rebuild(value, value[a:b]) for a, b in pairwise(bounds)]
    parts = children(value)
    if parts is None:
        return [value] * len(sizes)
    columns = [_split(part, rows, sizes) for part in parts]
    return [rebuild(value, [column[i] for column in columns]) for i in range(len(sizes))]


def _is_row_list(value: Any, rows: int) -> bool:
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields") or isinstance(value, torch.Size):
        return False
    # [inputs, targets] of a batch of two rows is a pair of columns, not a list of rows.
    columns = any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows for leaf in leaves(value))
    return len(value) == rows and not columns


def _cannot_cut(what: str) -> ValueError:
    return ValueError(
        message(
            "A batch is cut into micro-batches by rows: along dim 0 of its tensors, and its lists by entries.",
            got=f"{what} in the batch",
            source="the data loader",
            change="use plain tensors, or PipelineOptions(num_microbatches=1)",
        )
    )


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    """Returns what the whole batch's step would have returned.

    Tensors and lists with an entry per row are joined; floating-point numbers are averaged by weight, whole numbers
    (counts) are added up unless all are equal and none is the part's rows; of anything else the first is taken.

    Args:
        outputs: of the micro-batches' steps, with the same structure.
        sizes: their rows.
        weights: of their losses; they add up to one.
    """
    if len(outputs) == 1:
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs[0])
    first = outputs[0]
    if isinstance(first, Tensor):
        return _merge_tensors(list(outputs), sizes, weights)
    if isinstance(first, list) and all(len(o) == size for o, size in zip(outputs, sizes)) and not _holds_tensors(first):
        return [item for output in outputs for item in output]
    parts = children(first)
    if parts is not None:
        columns = [children(output) for output in outputs]
        merged = [merge_outputs([c[i] for c in columns if c is not None], sizes, weights) for i in range(len(parts))]
        return rebuild(first, merged)
    if isinstance(first, float):
        return sum(float(o) * w for o, w in zip(outputs, weights))
    if isinstance(first, int) and not isinstance(first, bool):
        is_count = list(outputs) == list(sizes) or any(o != first for o in outputs)
        return sum(int(o) for o in outputs) if is_count else first
    return first


def _merge_tensors(outputs: list[Tensor], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    outputs = [output.detach() for output in outputs]
    if all(output.dim() > 0 and output.shape[0] == size for output, size in zip(outputs, sizes)):
        return torch.cat(outputs)
    if len({output.shape for output in outputs}) > 1:
        return outputs
    if outputs[0].is_floating_point():
        return torch.stack([output * weight for output, weight in zip(outputs, weights)]).sum(0)
    if all(torch.equal(output, outputs[0]) for output in outputs):
        return outputs[0]
    return torch.stack(outputs).sum(0)


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))
