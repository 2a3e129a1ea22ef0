"""Bytes of state and of traffic that a data-parallel plan comes to. Exact, padding included.

With Psi parameters, N block units and one root unit on d shard ranks, one step of forward and backward costs
2N + 1 all-gathers (N + 1 if nothing is freed after forward) and N + 1 reduce-scatters; replicas add N + 1 all-reduces
of 1/d of the gradients (Rajbhandari et al. 2020, ZeRO, section 7; torch's fully_shard pads dim 0 to a multiple of d).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from lightning_pardist.base import axes
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.specs.config import AxisSizes
from lightning_pardist.specs.model_profile import ModelProfile, ParameterProfile
from lightning_pardist.specs.parallel_plan import DataParallelPlan, PrecisionPlan, ShardUnit, StateBytes, Traffic

DDP_FIRST_BUCKET_BYTES = 1024 * 1024
DDP_BUCKET_BYTES = 25 * 1024 * 1024
"""Defaults of torch's DistributedDataParallel: a small first bucket starts communication early."""
_BYTES_PER_SCALAR = 16
"""Its gradient in float64, and how many ranks have one (``run.reduce``)."""


def state_bytes(
    profile: ModelProfile,
    shard_size: int,
    optimizer_bytes_per_element: float | None,
    *,
    whole: Collection[str] = (),
) -> StateBytes:
    """Returns the bytes of training state on the rank that holds most, for parameters sharded ``shard_size`` ways.

    Args:
        profile: the module's parameters.
        shard_size: ranks that share dim 0 of every parameter; 1 for no sharding.
        optimizer_bytes_per_element: optimizer state per trainable element (8 for Adam in fp32), None if unknown.
        whole: names of parameters that every rank holds whole all the same.
    """

    def elements(p: ParameterProfile) -> int:
        return p.numel if p.name in whole else padded_numel(p, shard_size) // shard_size

    trainable = [p for p in profile.parameters if p.requires_grad]
    optimizer = None
    if optimizer_bytes_per_element is not None:
        optimizer = round(sum(elements(p) for p in trainable) * optimizer_bytes_per_element)
    return StateBytes(
        parameters=sum(elements(p) * p.dtype.itemsize for p in profile.parameters),
        gradients=sum(elements(p) * p.dtype.itemsize for p in trainable),
        optimizer=optimizer,
    )


def step_traffic(
    profile: ModelProfile, plan: DataParallelPlan, sizes: AxisSizes, precision: PrecisionPlan
) -> tuple[Traffic, ...]:
    """Returns the collectives of one optimizer step of one micro-batch."""
    by_name = {p.name: p for p in profile.parameters}
    if plan.kind == "replicate":
        return (_bucketed_all_reduce(by_name, plan, in_buckets=sizes.pipeline_parallel == 1),)
    if plan.kind == "shard":
        return _sharded_traffic(by_name, plan, sizes, precision)
    return ()


def _sharded_traffic(
    by_name: Mapping[str, ParameterProfile], plan: DataParallelPlan, sizes: AxisSizes, precision: PrecisionPlan
) -> tuple[Traffic, ...]:
    d = sizes.data_parallel_shard
    gathers = gathered = reduces = reduced = 0
    for unit in plan.units:
        members = [by_name[name] for name in unit.parameters]
        if not members:
            continue
        times = 2 if unit.reshard_after_forward else 1
        gathers += times
        gathered += times * sum(padded_numel(p, d) * gather_itemsize(p, unit, precision) for p in members)
        trainable = [p for p in members if p.requires_grad]
        if trainable:
            reduces += 1
            reduced += sum(padded_numel(p, d) * reduce_itemsize(p, unit, precision) for p in trainable)
    found = [
        Traffic(collective="all_gather", axis=axes.DATA_PARALLEL_SHARD, count=gathers, nbytes=gathered),
        Traffic(collective="reduce_scatter", axis=axes.DATA_PARALLEL_SHARD, count=reduces, nbytes=reduced),
    ]
    if sizes.data_parallel_replicate > 1:
        found.append(
            Traffic(collective="all_reduce", axis=axes.DATA_PARALLEL_REPLICATE, count=reduces, nbytes=reduced // d)
        )
    scalars = [by_name[name] for name in plan.scalar_parameters if by_name[name].requires_grad]
    if scalars:
        nbytes = len(scalars) * _BYTES_PER_SCALAR
        found.append(Traffic(collective="all_reduce", axis=axes.DATA_PARALLEL, count=1, nbytes=nbytes))
    return tuple(found)


def _bucketed_all_reduce(
    by_name: Mapping[str, ParameterProfile], plan: DataParallelPlan, *, in_buckets: bool
) -> Traffic:
    """Stages of a pipeline average their gradients in one go per dtype, when all micro-batches are through."""
    trainable = [p for p in by_name.values() if p.requires_grad and p.name not in plan.ignored_parameters]
    return Traffic(
        collective="all_reduce",
        axis=axes.DATA_PARALLEL,
        count=_bucket_count(reversed(trainable)) if in_buckets else len({p.dtype for p in trainable}),
        nbytes=sum(p.nbytes for p in trainable),
    )


def _bucket_count(parameters: Iterable[ParameterProfile]) -> int:
    """Buckets that torch's reducer forms: filled in order of gradients per dtype, closed once they reach their cap."""
    count, open_bytes, closed = 0, {}, set()  # type: int, dict[object, int], set[object]
    for p in parameters:
        size = open_bytes.get(p.dtype, 0) + p.nbytes
        cap = DDP_BUCKET_BYTES if p.dtype in closed else DDP_FIRST_BUCKET_BYTES
        if size >= cap:
            count += 1
            closed.add(p.dtype)
            size = 0
        open_bytes[p.dtype] = size
    return count + sum(1 for size in open_bytes.values() if size)


def padded_numel(p: ParameterProfile, shard_size: int) -> int:
    """Elements of a parameter after padding dim 0 to a multiple of the shard size; scalars are not sharded."""
    if not p.shape:
        return shard_size
    rows = math.ceil(p.shape[0] / shard_size) * shard_size
    return rows * math.prod(p.shape[1:])


def gather_itemsize(p: ParameterProfile, unit: ShardUnit, precision: PrecisionPlan) -> int:
    """Bytes of one element of a parameter while it is gathered."""
    if precision.gather_dtype is None or unit.full_precision or not p.dtype.is_floating_point:
        return p.dtype.itemsize
    return dtype_from_word(precision.gather_dtype).itemsize


def reduce_itemsize(p: ParameterProfile, unit: ShardUnit, precision: PrecisionPlan) -> int:
    """Bytes of one element of a gradient while it is reduced."""
    if precision.reduce_dtype is None or unit.full_precision:
        return p.dtype.itemsize
    return dtype_from_word(precision.reduce_dtype).itemsize
