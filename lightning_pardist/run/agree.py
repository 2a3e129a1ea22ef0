"""Small exchanges by which all ranks of a run come to the same decision, over the host-side control group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_pardist.mesh import Meshes

_T = TypeVar("_T")


def gather_objects(value: _T, meshes: Meshes | None) -> list[_T]:
    """Returns every rank's value, by rank. Values must be picklable."""
    if meshes is None:
        return [value]
    values: list[_T | None] = [None] * dist.get_world_size(meshes.control)
    dist.all_gather_object(values, value, group=meshes.control)
    return values  # type: ignore[return-value]  # every slot is filled by now


def maxima(values: Sequence[int], meshes: Meshes | None) -> list[int]:
    """Returns the largest value over ranks at every position; one collective of 8 bytes a value."""
    if meshes is None:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=meshes.control)
    return [int(v) for v in tensor.tolist()]
