"""One global gradient norm over whatever the gradients are: plain, sharded, replicated, of several dtypes.

The p-norm over all elements is (sum over shards of sum |g|^p)^(1/p), the infinity norm a maximum; each rank adds its
own shard's part, what several ranks hold is counted once, and one all-reduce gives every rank the same number. Norms
are taken in fp32 at least, so that the number does not depend on how a low-precision gradient happens to be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.mesh import Meshes
from lightning_pardist.torch_dist_api import local_tensor


def gradient_norm(
    parameters: Iterable[nn.Parameter], norm_type: float, meshes: Meshes | None, *, uncounted: Collection[int] = ()
) -> Tensor:
    """Returns the norm of all gradients together, equal on all ranks: a scalar in fp32 or wider.

    Args:
        parameters: those whose gradients count; each once, however often it is listed.
        norm_type: p of the p-norm, or ``inf``.
        meshes: None on one rank.
        uncounted: ids of parameters that another stage of a pipeline counts.

    Raises:
        ValueError: if ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"the norm type must be positive, got {norm_type}")
    listed = {id(p): p for p in parameters if id(p) not in uncounted}
    gradients = [p.grad for p in listed.values() if p.grad is not None]
    sharded = [g for g in gradients if _is_sharded(g)]
    whole = [g for g in gradients if not _is_sharded(g)]
    part = _power_sum(sharded, norm_type)
    op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
    has_stages = meshes is not None and meshes.pipeline_control is not None
    if meshes is not None and (has_stages or any(_is_dtensor(g) for g in gradients)):
        part = part.to(_reduction_device(meshes))
        dist.all_reduce(part, op=op, group=meshes.world["data_parallel_shard"].get_group())
    rest = _power_sum(whole, norm_type).to(part.device)
    total = torch.maximum(part, rest) if norm_type == float("inf") else part + rest
    if meshes is not None and has_stages:
        dist.all_reduce(total, op=op, group=meshes.pipeline_group)
    return total if norm_type == float("inf") else total ** (1.0 / norm_type)


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    meshes: Meshes | None,
    *,
    uncounted: Collection[int] = (),
) -> Tensor:
    """Scales all gradients in place so that their common norm is at most ``max_norm``; returns the norm before.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    listed = list({id(p): p for p in parameters}.values())
    norm = gradient_norm(listed, norm_type, meshes, uncounted=uncounted)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    _scale([local_tensor(p.grad) for p in listed if p.grad is not None], factor)
    return norm


def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamps every gradient element to ``[-limit, limit]`` in place; needs no communication."""
    for parameter in {id(p): p for p in parameters}.values():
        if parameter.grad is not None:
            local_tensor(parameter.grad).clamp_(-limit, limit)


def _is_dtensor(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor)


def _is_sharded(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(not placement.is_replicate() for placement in gradient.placements)


def _power_sum(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Returns sum |g|^p over this rank's elements (max |g| for infinity), in fp32 or wider."""
    locals_ = [local_tensor(g) for g in gradients]
    locals_ = [g for g in locals_ if g.numel()]
    if not locals_:
        device = local_tensor(gradients[0]).device if gradients else torch.device("cpu")
        return torch.zeros((), device=device)
    wide = [g if g.dtype in (torch.float32, torch.float64) else g.float() for g in locals_]
    norm = nn.utils.get_total_norm(wide, norm_type)
    return norm if norm_type == float("inf") else norm**norm_type


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))


def _reduction_device(meshes: Meshes) -> torch.device:
    device_type = meshes.world.device_type
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
