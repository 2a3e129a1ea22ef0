"""Layouts worth trying on a cluster, against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_pardist.plan.estimate import Cluster
from lightning_pardist.plan.report import format_bytes
from lightning_pardist.specs.estimate import Candidate, Estimate

FILL = 0.8
"""Share of a device's memory that a layout may fill: no run of 454 ran out below it (Fujii et al. 2024)."""


Shape = tuple[str, dict[str, Any]]
"""Words, and arguments of HybridStrategy."""


def candidate_layouts(cluster: Cluster, *, has_blocks: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yields layouts worth trying: words, arguments of HybridStrategy, and whether blocks are recomputed.

    A tensor axis stays within a node, for it talks in every block. Stages lie on whole nodes if there are several.
    """
    for words, arguments in (*_data_layouts(cluster), *_model_layouts(cluster)):
        yield words, arguments, False
        if has_blocks:
            yield f"{words}, recompute full", arguments, True


def _data_layouts(cluster: Cluster) -> Iterator[Shape]:
    world, per_node = cluster.world_size, cluster.ranks_per_node
    yield "ddp", {"zero_stage": 0}
    if world == 1:
        return
    for stage in (1, 2):
        yield f"zero-{stage}", {"zero_stage": stage, "data_parallel_shard_size": world}
    yield f"fsdp {world}", {"zero_stage": 3, "data_parallel_shard_size": world}
    for shard in _divisors(world)[1:-1]:
        if shard % per_node == 0 or per_node % shard == 0:
            yield f"hybrid {world // shard} x fsdp {shard}", _sharded(world // shard, shard)
    offloaded = {"zero_stage": 3, "data_parallel_shard_size": world, "cpu_offload": True}
    yield f"fsdp {world}, cpu offload", offloaded


def _model_layouts(cluster: Cluster) -> Iterator[Shape]:
    world, nodes, per_node = cluster.world_size, cluster.num_nodes, cluster.ranks_per_node
    for tensor in _divisors(per_node):
        for pipeline in _divisors(nodes if nodes > 1 else per_node // tensor):
            if tensor == pipeline == 1:
                continue
            sizes = {"pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}
            sizes = {name: size for name, size in sizes.items() if size > 1}
            words = " x ".join(f"{name[0]}p {size}" for name, size in sizes.items())
            data = world // (tensor * pipeline)
            if data == 1:
                yield words, sizes
                continue
            yield f"{words} x fsdp {data}", {**sizes, **_sharded(1, data)}
            copies, shard = nodes // pipeline, per_node // tensor
            if copies > 1 and shard > 1:
                yield f"{words} x hybrid {copies} x fsdp {shard}", {**sizes, **_sharded(copies, shard)}


def _sharded(replicate: int, shard: int) -> dict[str, Any]:
    sizes = {"data_parallel_replicate_size": replicate, "data_parallel_shard_size": shard}
    return {"zero_stage": 3, **sizes}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def too_large(estimate: Estimate, fill: float = FILL) -> bool:
    """Returns whether a rank holds more than ``fill`` of a device."""
    assert estimate.device is not None
    return estimate.worst.total > estimate.device.memory_bytes * fill


def judge(layout: str, arguments: dict[str, Any], estimate: Estimate, fill: float = FILL) -> Candidate:
    """Returns the candidate with the reason why it will not do, if there is one."""
    assert estimate.device is not None
    worst, rejected = estimate.worst, None
    if too_large(estimate, fill):
        terms = {
            name: getattr(worst, name) or 0
            for name in ("parameters", "gradients", "optimizer", "activations", "gather_buffers", "stage_buffers")
        }
        most = max(terms, key=lambda name: terms[name])
        rejected = (
            f"needs {format_bytes(worst.total)} on rank {estimate.worst_rank}, more than {fill:.0%} of "
            f"{format_bytes(estimate.device.memory_bytes)}; most of it {most.replace('_', ' ')} "
            f"({format_bytes(terms[most])})" + (", activations not counted" if worst.activations is None else "")
        )
    return Candidate(layout=layout, arguments=arguments, estimate=estimate, rejected=rejected)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns those that fit, the fastest by the roofline first, then those that do not, the smallest first.

    Layouts train as many batches in a step as they have data ranks, so they are compared by their time per batch.
    """

    def key(candidate: Candidate) -> tuple[bool, bool, float, float, int]:
        estimate = candidate.estimate
        if estimate is None:
            return True, True, float("inf"), float("inf"), 0
        seconds = estimate.seconds_per_batch or 0.0
        talk = sum(each.sent_per_rank for each in estimate.traffic) / estimate.plan.sizes.data_parallel
        offloaded = estimate.worst.host > 0  # moves every parameter over the host's bus: a last resort
        if candidate.rejected:
            return True, False, float(estimate.worst.total), 0.0, 0
        return False, offloaded, seconds, float(talk), estimate.worst.total

    return sorted(candidates, key=key)
