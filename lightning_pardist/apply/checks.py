"""Checks across ranks before and after a plan is applied. Each ends on all ranks together, or on none."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_pardist.base.errors import message
from lightning_pardist.mesh import Meshes
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.torch_dtensor_api import local_tensor

_T = TypeVar("_T")


def check_modules(module: nn.Module, meshes: Meshes | None) -> None:
    """Refuses modules that something else has spread already, and ranks that hold different modules.

    To be called before anything is planned: ranks with different modules would wait for each other in all that follows.
    Costs one exchange of a short digest.

    Raises:
        ValueError: on all ranks, naming the first wrapped module or the first difference.
    """
    lines = list(_signature(module))
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    found = [(_wrapped(module), digest)] if meshes is None else _gather((_wrapped(module), digest), meshes)
    # Before differences: FSDP1 gives every rank other parameters.
    if wrapped := next((text for text, _ in found if text), None):
        raise ValueError(
            message(
                "The strategy spreads the plain module itself; nothing in it may be wrapped already.",
                got=wrapped,
                source="the LightningModule after configure_model",
                change="remove the wrapping (DDP, FSDP or fully_shard) from the module's code",
            )
        )
    digests = [digest for _, digest in found]
    if meshes is None or len(set(digests)) == 1:
        return
    raise ValueError(
        message(
            "All ranks must build the same module: same parameter names, shapes and dtypes, in the same order.",
            got=_difference(lines, digests, meshes),
            source=f"the LightningModule on each rank ({len(set(digests))} different modules on {len(digests)} ranks)",
            change="make the module's construction depend on nothing that differs between ranks",
        )
    )


def check_same_plan(plan: ParallelPlan, meshes: Meshes) -> None:
    """Refuses ranks that hold different plans; costs one exchange of a short digest.

    Raises:
        ValueError: on all ranks, naming the first difference.
    """
    digests = _gather(plan.fingerprint(), meshes)
    if len(set(digests)) == 1:
        return
    raise ValueError(
        message(
            "All ranks must ask for the same plan.",
            got=_difference(plan.to_json().splitlines(), digests, meshes),
            source=f"the strategy's arguments on each rank ({len(set(digests))} different plans)",
            change="give the strategy the same arguments on all ranks",
        )
    )


def check_equal_replicas(module: nn.Module, meshes: Meshes, *, absent: Collection[str] = ()) -> None:
    """Checks that copies of a shard hold the same bits; costs one exchange of a checksum.

    Raises:
        ValueError: on all ranks, naming the ranks that differ.
    """
    total = torch.zeros((), dtype=torch.int64)
    for index, (name, parameter) in enumerate(module.named_parameters()):
        if name in absent:
            continue
        shard = local_tensor(parameter.detach()).contiguous().flatten()
        if shard.numel():
            total += (index + 1) * shard.view(torch.uint8).to(torch.int64).sum().cpu()
    coordinate = meshes.model.get_local_rank()
    sums = _gather((coordinate, int(total)), meshes)
    by_shard: dict[int, set[int]] = {}
    for shard_rank, value in sums:
        by_shard.setdefault(shard_rank, set()).add(value)
    if all(len(values) == 1 for values in by_shard.values()):
        return
    raise ValueError(
        message(
            "All replicas must start from the same weights.",
            got=f"checksums ((stage, shard), sum) by rank: {list(enumerate(sums))}",
            source="the parameters after set-up",
            change="load weights on every rank, and do not change them on single ranks in setup or configure_model",
        )
    )


def _wrapped(module: nn.Module) -> str:
    """Names the first module that is wrapped, or returns an empty text."""
    for name, child in module.named_modules():
        if isinstance(child, (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)):
            return f"{name or 'the LightningModule'} is a {type(child).__name__}"
    return ""


def _difference(lines: list[str], digests: list[str], meshes: Meshes) -> str:
    """Names the first line in which the first odd rank differs from rank 0; every rank must call."""
    odd = next(rank for rank, other in enumerate(digests) if other != digests[0])
    everything = _gather(lines, meshes)
    first, second = _first_difference(everything[0], everything[odd])
    return f"rank 0 has {first.strip()}; rank {odd} has {second.strip()}"


def _signature(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        lazy: bool = is_lazy(parameter)
        if lazy:  # describe says what is wrong with it
            yield f"parameter {name} not initialised"
            continue
        yield f"parameter {name} {tuple(parameter.shape)} {parameter.dtype} requires_grad={parameter.requires_grad}"
    for name, buffer in module.named_buffers():
        yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"


def _first_difference(left: list[str], right: list[str]) -> tuple[str, str]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    longer = left if len(left) > len(right) else right
    extra = longer[min(len(left), len(right))]
    return (extra, "nothing there") if longer is left else ("nothing there", extra)


def _gather(value: _T, meshes: Meshes) -> list[_T]:
    values: list[_T | None] = [None] * dist.get_world_size(meshes.control)
    dist.all_gather_object(values, value, group=meshes.control)
    return [v for v in values if v is not None]
