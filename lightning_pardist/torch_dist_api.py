"""Every private name of torch.distributed that this package relies on, with the reason and the way out.

Those of its DTensors are in ``torch_dtensor_api``, those of its pipelines in ``torch_pipelining_api`` and
``torch_schedules_api``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_pardist.base.torch_api import without_dispatch_modes


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
