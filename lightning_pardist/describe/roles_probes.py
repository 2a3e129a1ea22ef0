"""How the modules around regions were called in the observed step, so that a region can be tried alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.words import common_module, dtype_word
from lightning_pardist.describe.roles_sharing import Sharing
from lightning_pardist.describe.roles_trace import Trace
from lightning_pardist.specs.tensor_roles import RegionProbe, ShardCall, SharedOutput, TensorLeaf, TensorRegion


def region_probes(
    trace: Trace, regions: Sequence[TensorRegion], calls: Sequence[ShardCall], sharing: Sharing
) -> Iterator[RegionProbe]:
    """Yields one probe for each kind of region: those of like blocks differ in their indices only.

    A region whose parts have no module in common but the root is left out.
    """
    owners = {region.index: common_module(region_members(region, calls)) for region in regions}
    seen: set[tuple[object, ...]] = set()
    for region in regions:
        owner = owners[region.index]
        inside = tuple(index for index, other in owners.items() if other == owner or other.startswith(owner + "."))
        kind = (
            ".".join("*" if part.isdigit() else part for part in owner.split(".")),
            tuple((p.terms, p.dim) for index in inside for p in regions[index].parameters),
        )
        if owner and owner in trace.module_calls and kind not in seen:
            seen.add(kind)
            yield region_probe(trace, owner, inside, regions, sharing)


def region_probe(
    trace: Trace, owner: str, inside: tuple[int, ...], regions: Sequence[TensorRegion], sharing: Sharing
) -> RegionProbe:
    """Returns how a module was called, with the regions that lie in it as a whole."""
    call = trace.module_calls[owner]
    return RegionProbe(
        module=owner,
        regions=inside,
        parameters=tuple(p.name for index in inside for p in regions[index].parameters),
        args=tuple(map(_leaf, call.args)),
        kwargs={key: _leaf(item) for key, item in call.kwargs.items()},
        shared_outputs=tuple(_shared_outputs(call.output, sharing, inside)),
    )


def _shared_outputs(output: Any, sharing: Sharing, regions: Sequence[int]) -> Iterator[SharedOutput]:
    """Yields what leaves the module in shares, such as attention weights per head, which nobody sums up."""
    for position, tensor in enumerate(tensors_in(output)):
        dims = tuple(dim for dim in sharing.dims(tensor) if dim.region in regions)
        if dims:
            yield SharedOutput(position=position, shape=tuple(int(size) for size in tensor.shape), dims=dims)


def region_members(region: TensorRegion, calls: Sequence[ShardCall]) -> tuple[str, ...]:
    """Returns the modules that hold a region's parameters or make its calls."""
    names = [parameter.name.rpartition(".")[0] for parameter in region.parameters]
    names += [call.module for call in calls if region.index in call.regions]
    return tuple(dict.fromkeys(names))


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorLeaf(tuple(int(size) for size in value.shape), dtype_word(value.dtype), value.requires_grad)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (tuple, list):
        return type(value)(_leaf(item) for item in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _leaf(item) for key, item in value.items()}
    return None
