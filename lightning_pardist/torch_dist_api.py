"""Every private name of torch.distributed that this package relies on, with the reason and the way out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from lightning_pardist.base.torch_api import without_dispatch_modes

if TYPE_CHECKING:
    from torch import Tensor


def flatten_axes(mesh: DeviceMesh, axes: Sequence[str], *, name: str) -> DeviceMesh:
    """Returns the joint axis, also reachable as ``mesh[name]``.

    ``DeviceMesh._flatten`` is what torchtitan and accelerate use; torch has no public spelling in 2.13.
    """
    return mesh[tuple(axes)]._flatten(name)


def default_store() -> Store:
    """Returns the key-value store that the ranks met at. Its waits can be bounded and tell who is missing."""
    return distributed_c10d._get_default_store()


def sequence_number(group: ProcessGroup, device: torch.device) -> int:
    """Returns how many collectives this rank has started on a group."""
    backend: Any = group._get_backend(device)
    return int(backend._get_sequence_number_for_group())


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Bounds every later collective of a group. ``init_device_mesh`` cannot be told."""
    distributed_c10d._set_pg_timeout(timeout, group)


def fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    """Yields torch's record of every parameter held by fully_shard below ``root``.

    Used for ``sharded_param`` and, while gathered, ``unsharded_param``: torch has no public view on the pair.
    """
    for group in fsdp_groups(root):
        yield from group.fsdp_params


def fsdp_groups(root: nn.Module) -> Iterator[Any]:
    """Yields torch's parameter groups below ``root``, each once (several modules may share one)."""
    seen: set[int] = set()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def refresh_trainability(root: nn.Module) -> None:
    """Makes fully_shard notice that ``requires_grad`` changed after its lazy start.

    torch derives a group's gradient dtypes once, from the parameters that train at the first forward. A backbone that
    is unfrozen later (BackboneFinetuning) would have none and its reduction fails. Gathered copies follow as well.
    """
    for group in fsdp_groups(root):
        if hasattr(group, "_reduce_dtype"):
            group._init_mp_dtypes()
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            if gathered is not None and gathered.requires_grad != parameter.sharded_param.requires_grad:
                gathered.requires_grad_(parameter.sharded_param.requires_grad)


def quiet_forward_hooks(root: FSDPModule, quiet: Callable[[], bool]) -> None:
    """Makes fully_shard's hooks around ``root(...)`` stand aside while ``quiet()`` is true.

    For calls of a module inside its own registered forward method, which torch 2.13 does not know: the end of the inner
    call marks the forward as over, so the end of the outer one frees the parameters whatever ``reshard_after_forward``
    says, and backward gathers them once more.
    """
    state = root._get_fsdp_state()

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if quiet() else hook(*args)

    module = cast(nn.Module, root)
    for hooks, handle in (
        (module._forward_pre_hooks, state._pre_forward_hook_handle),
        (module._forward_hooks, state._post_forward_hook_handle),
    ):
        hooks[handle.id] = guarded(hooks[handle.id])


def hide_hooks_from_modes(module: FSDPModule) -> None:
    """Makes fully_shard's hooks around ``module(...)`` invisible to dispatch modes.

    For units inside a block that is recomputed selectively: torch's selective checkpoint matches the operators of the
    recomputation with those of the forward pass one by one, and a unit that is gathered already gathers nothing again.
    """
    state = module._get_fsdp_state()

    def hidden(hook: Callable[..., Any]) -> Callable[..., Any]:
        def without_modes(*args: Any) -> Any:
            with without_dispatch_modes():
                return hook(*args)

        return without_modes

    for handle in {state._pre_forward_hook_handle, state._post_forward_hook_handle}:
        for each in getattr(handle, "handles", (handle,)):  # a group of modules has one handle for all its hooks
            table: Any = each.hooks_dict_ref()
            table[each.id] = hidden(table[each.id])


def whole_parameter(record: Any) -> nn.Parameter | None:
    """Returns the parameter that the user's code computes with, None before it was first gathered.

    Args:
        record: one of ``fsdp_parameters``.
    """
    return getattr(record, "_unsharded_param", None)


@contextmanager
def outside_reducer() -> Iterator[None]:
    """Hides the running DistributedDataParallel from torch.compile in this context.

    Otherwise it would cut what it compiles at the reducer's buckets, and refuse checkpoints inside. Blocks that are
    compiled one by one already let gradients start on their way after each block.
    """
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = None
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before


def has_whole_gradient(record: Any) -> bool:
    """Returns True if a gradient of the whole parameter waits to be reduced.

    Args:
        record: one of ``fsdp_parameters``.
    """
    whole = whole_parameter(record)
    return (whole is not None and whole.grad is not None) or record.unsharded_accumulated_grad is not None


def drop_whole_gradient(record: Any) -> None:
    """Forgets a gradient of the whole parameter that waits to be reduced.

    Args:
        record: one of ``fsdp_parameters``.
    """
    whole = whole_parameter(record)
    if whole is not None:
        whole.grad = None
    record.unsharded_accumulated_grad = None


CAN_REDUCE_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Public in torch from 2.13 on."""


def reduce_unused_parameters(root: FSDPModule, *, enable: bool) -> None:
    """Makes parameters without a gradient take part in reductions with zeros.

    Raises:
        RuntimeError: on older torch, when it is needed.
    """
    if CAN_REDUCE_UNUSED:
        root.set_reduce_scatter_unused_params(enable)
    elif enable:
        raise RuntimeError(
            "dropping the last micro-batch of an accumulation window under hybrid sharding needs torch >= 2.13"
        )


def is_gathered(module: nn.Module) -> bool:
    """Returns True while the module's own group holds whole parameters."""
    state = cast(FSDPModule, module)._get_fsdp_state()
    return any(group.is_unsharded for group in state._fsdp_param_groups)


def ignore_in_reducer(module: nn.Module, names: Sequence[str]) -> None:
    """Keeps parameters out of DistributedDataParallel; torch offers this under a private name only."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


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


def compute_on_local_shards(root: nn.Module) -> None:
    """Lets fully_shard gather parameters that are sharded on another axis into plain tensors, not DTensors.

    fully_shard stores such a parameter as a DTensor of both axes and shows it to the code as one of the other axis.
    Here the code computes with plain local tensors, without DTensor's dispatch; what is stored stays as it is.
    """
    for record in fsdp_parameters(root):
        record.is_dtensor = False
        for name in ("_unsharded_dtensor_spec", "_tp_spec"):
            if hasattr(record, name):
                setattr(record, name, None)


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
