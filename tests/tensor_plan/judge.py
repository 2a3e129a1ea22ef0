"""Proof by numbers, in one process, that the ranks of a region would need nothing from each other before its end.

For one rank of ``size``: the closing weights are set to zero outside the rank's share, and then every other parameter
of the region is drawn anew outside it. If the roles are right, nothing in the output may change: what the rank computes
depends on its own share alone. A norm over a sharded dim, a wrong layout of fused parts, a forgotten bias or parts in
the wrong order change it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pardist.specs.tensor_roles import ShardedParameter, TensorRegion, TensorRoles


def share_of(part_sizes: Sequence[int], units: int, rank: int, size: int) -> torch.Tensor:
    """Returns the indices of a dim that a rank holds: its units of each part."""
    indices, start = [], 0
    mine = range(rank * units // size, (rank + 1) * units // size)
    for width in part_sizes:
        per_unit = width // units
        assert per_unit * units == width
        indices += [torch.arange(start + unit * per_unit, start + (unit + 1) * per_unit) for unit in mine]
        start += width
    return torch.cat(indices)


def _outside(parameter: torch.Tensor, given: ShardedParameter, units: int, rank: int, size: int) -> torch.Tensor:
    mask = torch.ones(parameter.shape[given.dim], dtype=torch.bool)
    mask[share_of(given.parts, units, rank, size)] = False
    shape = [1] * parameter.dim()
    shape[given.dim] = -1
    return mask.view(shape).expand(parameter.shape)


def changes(
    module: nn.Module,
    roles: TensorRoles,
    run: Callable[[], torch.Tensor],
    *,
    size: int = 2,
    only: Container[int] | None = None,
) -> dict[int, float]:
    """Returns by region how much the output changed (0 is right), the largest over the ranks; the module is put back.

    Args:
        module: the real module, in a state in which two runs give the same result.
        roles: what was derived for it.
        run: the output of the module on the batch.
        size: ranks.
        only: indices of the regions to look at; None for all.
    """
    parameters = dict(module.named_parameters())
    result: dict[int, float] = {}
    for region in roles.regions:
        if region.units < size or (only is not None and region.index not in only):
            continue
        before = {given.name: parameters[given.name].detach().clone() for given in region.parameters}
        result[region.index] = max(_change(parameters, roles, region, run, rank, size, before) for rank in range(size))
    return result


@torch.no_grad()
def _change(
    parameters: dict[str, nn.Parameter],
    roles: TensorRoles,
    region: TensorRegion,
    run: Callable[[], torch.Tensor],
    rank: int,
    size: int,
    before: dict[str, torch.Tensor],
) -> float:
    closers = {weight.parameter for weight in roles.weights if weight.name in region.closers}
    generator = torch.Generator().manual_seed(rank)
    for given in region.parameters:
        if given.name in closers:
            parameter = parameters[given.name]
            parameter[_outside(parameter, given, region.units, rank, size)] = 0.0
    reference = run().clone()
    for given in region.parameters:
        if given.name not in closers:
            parameter = parameters[given.name]
            outside = _outside(parameter, given, region.units, rank, size)
            noise = torch.randn(int(outside.sum()), generator=generator, dtype=parameter.dtype)
            parameter[outside] = noise * parameter.std(correction=0).clamp_min(0.02)
    changed = run()
    for name, value in before.items():
        parameters[name].copy_(value)
    whole = run()
    assert not torch.equal(whole, reference), "the region has no effect on the output: the proof would be empty"
    return float((changed - reference).abs().max() / reference.abs().max().clamp_min(1e-12))


def output_of(value: Any) -> torch.Tensor:
    """Returns the floating-point tensors of an output as one vector."""
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)
    items = list(value.values()) if isinstance(value, dict) else list(value)
    return torch.cat(
        [item.reshape(-1) for item in items if isinstance(item, torch.Tensor) and item.is_floating_point()]
    )
