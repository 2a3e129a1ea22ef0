"""Every private name of torch.distributed.tensor that this package relies on, and the layouts added to torch's own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from torch import Tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor without autograd's bookkeeping, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


class UnitShard(_StridedShard):
    """A dim shared out in stretches that ``Shard`` cannot name: whole heads, fused parts, key-value heads held twice.

    Acts on the tensor before the placements of other mesh axes on the same dim, which then cut the local part in equal
    chunks, as fully_shard does. It is a strided shard to torch, whose caches tell placements apart by dim and factor
    only: the factor is a number of its own for every set of stretches, and nothing else.
    """

    stretches: tuple[tuple[tuple[int, int], ...], ...]

    def __new__(cls, dim: int, stretches: tuple[tuple[tuple[int, int], ...], ...]) -> UnitShard:
        return super().__new__(cls, dim, split_factor=_number_of(stretches))  # type: ignore[call-arg]

    def __init__(self, dim: int, stretches: tuple[tuple[tuple[int, int], ...], ...]) -> None:
        """Names what every rank of the axis holds.

        Args:
            dim: the tensor dim.
            stretches: by rank, (start, length) of what it holds of the whole dim, in order.
        """
        super().__init__(dim, split_factor=_number_of(stretches))
        self.stretches = stretches

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitShard) and (self.dim, self.stretches) == (other.dim, other.stretches)

    def __hash__(self) -> int:
        return hash((self.dim, self.stretches))

    def __repr__(self) -> str:
        return f"UnitShard(dim={self.dim}, lengths={[self.local_length(rank) for rank in range(len(self.stretches))]})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitShard, (self.dim, self.stretches)

    def local_length(self, rank: int) -> int:
        """Returns how much of the dim a rank holds."""
        return sum(length for _, length in self.stretches[rank])

    def _to_replicate_tensor(  # type: ignore[override]  # no symbolic sizes here
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> Tensor:
        if local_tensor.shape[self.dim] != self.local_length(mesh.get_local_rank(mesh_dim)):
            raise RuntimeError(
                "this parameter is sharded by whole units on the tensor axis and by fully_shard on the same dim, which "
                "DTensor.full_tensor() cannot undo; use lightning_pardist.whole_tensor(parameter)"
            )
        return self.gather(local_tensor, mesh.get_group(mesh_dim))

    def gather(self, local: Tensor, group: ProcessGroup) -> Tensor:
        """Returns the whole tensor from every rank's part."""
        longest = max(self.local_length(rank) for rank in range(len(self.stretches)))
        parts = gather_uneven(local, self.dim, longest, group)
        shape = list(local.shape)
        shape[self.dim] = max(start + length for held in self.stretches for start, length in held)
        whole = local.new_empty(shape)
        for part, held in zip(parts, self.stretches, strict=True):
            position = 0
            for start, length in held:
                whole.narrow(self.dim, start, length).copy_(part.narrow(self.dim, position, length))
                position += length
        return whole


def _number_of(stretches: object) -> int:
    """Returns a large number that two sets of stretches share only if they are the same, for all practical purposes."""
    return (1 << 32) + zlib.crc32(repr(stretches).encode())


def gather_uneven(local: Tensor, dim: int, longest: int, group: ProcessGroup) -> list[Tensor]:
    """Returns every rank's tensor, each padded along ``dim`` to ``longest``."""
    shape = list(local.shape)
    shape[dim] = longest
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return parts


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole of a parameter, gradient or optimizer state, however it is sharded; a plain tensor as it is.

    As ``DTensor.full_tensor``, for the layouts of this package too. Every rank of its mesh must call it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placed = [(i, p) for i, p in enumerate(tensor.placements) if isinstance(p, UnitShard)]
    if not placed:
        return tensor.full_tensor()
    ((axis, unit),) = placed
    mesh, local = tensor.device_mesh, local_tensor(tensor.detach())
    length = unit.local_length(mesh.get_local_rank(axis))
    for index, placement in reversed(list(enumerate(tensor.placements))):
        if index == axis or placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        whole_length = length if dim == unit.dim else tensor.shape[dim]
        chunk = -(-whole_length // mesh.size(index))
        parts = gather_uneven(local, dim, chunk, mesh.get_group(index))
        local = torch.cat(parts, dim).narrow(dim, 0, whole_length)
    return unit.gather(local, mesh.get_group(axis))


def compare_by_value() -> None:
    """Lets ``torch.equal`` compare tensors of all layouts, and with plain ones; torch's rule wants two of one layout.

    Lightning's callbacks that unfreeze layers look by value for parameters that an optimizer holds already.
    """
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.equal.default] = _equal


def _equal(op_call: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    one, other = args
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if one.shape != other.shape:
        return False
    if not (isinstance(one, DTensor) and isinstance(other, DTensor) and _layout(one) == _layout(other)):
        return torch.equal(whole_tensor(one), whole_tensor(other))
    same = torch.equal(local_tensor(one), local_tensor(other))
    flag = torch.tensor(int(same), device=local_tensor(one).device)
    for axis in range(one.device_mesh.ndim):
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=one.device_mesh.get_group(axis))
    return bool(flag)


def _layout(tensor: DTensor) -> tuple[object, object]:
    return tensor.device_mesh, tensor.placements


def held_rows(tensor: Tensor, unit: UnitShard) -> tuple[int, int]:
    """Returns which part of this rank's units fully_shard has left to it: begin and end along the unit's dim."""
    assert isinstance(tensor, DTensor)
    index = tensor.placements.index(unit)
    mesh = tensor.device_mesh
    begin, end = 0, unit.local_length(mesh.get_local_rank(index))
    for axis, placement in enumerate(tensor.placements):
        if axis != index and not placement.is_replicate() and placement.dim == unit.dim:  # type: ignore[attr-defined]
            chunk = -(-(end - begin) // mesh.size(axis))
            start = begin + chunk * mesh.get_local_rank(axis)
            begin, end = min(start, end), min(start + chunk, end)
    return begin, end


def held_by_several(tensor: Tensor, unit: UnitShard) -> tuple[tuple[int, int, int], ...]:
    """Returns (start, length, ranks) of the stretches of the local tensor that several ranks of the axis hold."""
    assert isinstance(tensor, DTensor)
    begin, end = held_rows(tensor, unit)
    found, position = [], 0
    for stretch in unit.stretches[tensor.device_mesh.get_local_rank(tensor.placements.index(unit))]:
        holders = sum(stretch in held for held in unit.stretches)
        low, high = max(position, begin), min(position + stretch[1], end)
        if holders > 1 and low < high:
            found.append((low - begin, high - low, holders))
        position += stretch[1]
    return tuple(found)


def as_dtensor(local: Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor of the same layout around a local tensor, without autograd's bookkeeping."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def placed(local: Tensor, mesh: DeviceMesh, layout: tuple[Any, tuple[int, ...]] | None) -> DTensor:
    """Returns a DTensor of a one-axis mesh.

    Args:
        local: this rank's part, or all of it.
        mesh: 1-D.
        layout: placement and whole shape; None for replicated.
    """
    if layout is None:
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    placement, shape = layout
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
