"""Which boxes of a whole tensor a rank holds, whatever the layout.

The one description that saving, loading and gathering share. A plain tensor is one box; a DTensor is one box or, if its
placement is strided (fused projections under tensor parallel), several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pardist import torch_dtensor_api
from lightning_pardist.base.errors import message

Run = tuple[int, int]
"""Start and length along one dim of the whole tensor."""


@dataclass(frozen=True)
class Piece:
    """A box of the whole tensor and this rank's memory for it."""

    offset: tuple[int, ...]
    """Position of the box in the whole tensor."""
    view: Tensor
    """Plain tensor, a view into the live one: its shape is the box's."""


@dataclass
class Entry:
    """One named tensor as this rank holds it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    """Empty if this rank's shard has no elements."""
    lowest_rank_writes: bool = False
    """For buffers, of which every rank has its own: the file gets the lowest rank's, as in DDP."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(name: str, tensor: Tensor, *, lowest_rank_writes: bool = False) -> Entry:
    """Returns the boxes of ``tensor`` on this rank. They share its memory.

    Raises:
        ValueError: if the tensor is a pending sum (Partial), which has no value yet.
    """
    shape = tuple(tensor.shape)
    entry = Entry(name, shape, tensor.dtype, lowest_rank_writes=lowest_rank_writes)
    if not isinstance(tensor, DTensor):
        entry.pieces.append(Piece((0,) * len(shape), tensor.detach()))
        return entry
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            message(
                "A tensor in a checkpoint must have a value; a pending sum over ranks has none.",
                got=f"{name} with placements {tensor.placements}",
                source="the module's or the optimizer's state",
                change="redistribute it to Replicate() or Shard(dim) before the save",
            )
        )
    local = torch_dtensor_api.local_tensor(tensor.detach())
    if math.prod(shape) == 0:
        entry.pieces.append(Piece((0,) * len(shape), local.new_empty(shape)))
        return entry
    runs = held_runs(shape, tensor)
    if runs is not None:
        entry.pieces.extend(_boxes(runs, local))
    return entry


def held_runs(shape: Sequence[int], tensor: DTensor) -> list[list[Run]] | None:
    """Returns for each dim the stretches that this rank holds, in local order; None if it is outside the mesh.

    Placements act from left to right; each deals the stretches out as ``torch.chunk`` does. A strided shard first cuts
    what it finds into ``split_factor`` parts and deals out each of them.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    unit_dims = set()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, torch_dtensor_api.UnitShard):  # acts before the others, see there
            runs[placement.dim] = _joined(list(placement.stretches[coordinate[axis]]))
            unit_dims.add(placement.dim)
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() or isinstance(placement, torch_dtensor_api.UnitShard):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        parts = _chunk(runs[dim], 1 if dim in unit_dims else getattr(placement, "split_factor", 1))
        size = tensor.device_mesh.size(axis)
        runs[dim] = _joined([run for part in parts for run in _chunk(part, size)[coordinate[axis]]])
    return runs


def _boxes(runs: list[list[Run]], local: Tensor) -> list[Piece]:
    pieces = []
    for box in itertools.product(*(_with_local_start(dim_runs) for dim_runs in runs)):
        view = local
        for dim, (_, local_start, length) in enumerate(box):
            view = view.narrow(dim, local_start, length)
        pieces.append(Piece(tuple(start for start, _, _ in box), view))
    return pieces


def _with_local_start(runs: list[Run]) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((length for _, length in runs), initial=0)
    return [(start, local_start, length) for (start, length), local_start in zip(runs, starts)]


def _chunk(runs: list[Run], parts: int) -> list[list[Run]]:
    """Deals stretches into parts of ceil(total / parts) elements; the last parts may be short or empty."""
    total = sum(length for _, length in runs)
    size = -(-total // parts) if total else 0
    return [_cut(runs, part * size, (part + 1) * size) for part in range(parts)]


def _cut(runs: list[Run], begin: int, end: int) -> list[Run]:
    out, position = [], 0
    for start, length in runs:
        low, high = max(begin, position), min(end, position + length)
        if low < high:
            out.append((start + low - position, high - low))
        position += length
    return out


def _joined(runs: list[Run]) -> list[Run]:
    out: list[Run] = []
    for start, length in runs:
        if out and out[-1][0] + out[-1][1] == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return out
