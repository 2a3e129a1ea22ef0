"""Every private name of torch.distributed that this package relies on, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import Tensor


def flatten_axes(mesh: DeviceMesh, axes: Sequence[str], *, name: str) -> DeviceMesh:
    """Returns the joint axis, also reachable as ``mesh[name]``.

    ``DeviceMesh._flatten`` is what torchtitan and accelerate use; torch has no public spelling in 2.13.
    """
    return mesh[tuple(axes)]._flatten(name)


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


def whole_parameter(record: Any) -> nn.Parameter | None:
    """Returns the parameter that the user's code computes with, None before it was first gathered.

    Args:
        record: one of ``fsdp_parameters``.
    """
    return getattr(record, "_unsharded_param", None)


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
