"""One global gradient norm over whatever the gradients are: plain, sharded, replicated, of several dtypes.

The p-norm over all elements is (sum over shards of sum |g|^p)^(1/p), the infinity norm a maximum; each rank adds its
own shard's part, what several ranks hold is counted once, and one all-reduce gives every rank the same number. Norms
are taken in fp32 at least, so that the number does not depend on how a low-precision gradient happens to be cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.base import axes
from lightning_pardist.mesh import Meshes
from lightning_pardist.torch_dtensor_api import UnitShard, held_by_several, local_tensor

_COPIED_AXES = (axes.DATA_PARALLEL_SHARD, axes.CONTEXT_PARALLEL, axes.TENSOR_PARALLEL)
"""Axes on which a gradient that is not sharded is the same on all ranks. Stages hold different parameters."""


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
    counted = {id(p): p for p in parameters if id(p) not in uncounted}.values()
    gradients = [p.grad for p in counted if p.grad is not None]
    part = _power_sum(gradients, norm_type, meshes)
    if meshes is not None and meshes.model.size() > 1:
        part = part.to(_reduction_device(meshes))
        op = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
        dist.all_reduce(part, op=op, group=meshes.model.get_group())
    return part if norm_type == float("inf") else part ** (1.0 / norm_type)


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


def _power_sum(gradients: list[Tensor], norm_type: float, meshes: Meshes | None) -> Tensor:
    """Returns sum |g|^p over this rank's elements (max |g| for infinity), in fp32 or wider.

    What several ranks hold counts as one over their number on each of them.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        for copies, view in _views(gradient, meshes):
            if view.numel():
                by_copies.setdefault(copies, []).append(view)
    device = local_tensor(gradients[0]).device if gradients else torch.device("cpu")
    total = torch.zeros((), device=device)
    for copies, views in by_copies.items():
        wide = [v if v.dtype in (torch.float32, torch.float64) else v.float() for v in views]
        norm = nn.utils.get_total_norm(wide, norm_type).to(device)
        if norm_type == float("inf"):
            total = torch.maximum(total.to(norm.dtype), norm)
        else:
            total = total + norm**norm_type / copies
    return total


def _views(gradient: Tensor, meshes: Meshes | None) -> Iterator[tuple[int, Tensor]]:
    """Yields parts of this rank's gradient with the number of ranks of the model that hold the same."""
    local = local_tensor(gradient)
    copies = _copies(gradient, meshes)
    unit = next((p for p in getattr(gradient, "placements", ()) if isinstance(p, UnitShard)), None)
    shared = held_by_several(gradient, unit) if unit is not None else ()
    position = 0
    for start, length, holders in shared:
        assert unit is not None
        yield copies, local.narrow(unit.dim, position, start - position)
        yield copies * holders, local.narrow(unit.dim, start, length)
        position = start + length
    if not shared:
        yield copies, local
    elif unit is not None:
        yield copies, local.narrow(unit.dim, position, local.shape[unit.dim] - position)


def _copies(gradient: Tensor, meshes: Meshes | None) -> int:
    if meshes is None:
        return 1
    names = getattr(getattr(gradient, "device_mesh", None), "mesh_dim_names", None) or ()
    placements = dict(zip(names, getattr(gradient, "placements", ())))
    total = 1
    for axis in _COPIED_AXES:
        placement = placements.get(axis)
        if placement is None or placement.is_replicate():
            total *= meshes.world[axis].size()
    return total


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))


def _reduction_device(meshes: Meshes) -> torch.device:
    device_type = meshes.world.device_type
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
