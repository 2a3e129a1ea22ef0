"""Layouts worth trying on a cluster, against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_pardist.plan.estimate import Cluster
from lightning_pardist.plan.report import format_bytes
from lightning_pardist.specs.estimate import Candidate, Estimate

FILL = 0.8
"""Share of a device's memory that a layout may fill: no run of 454 ran out below it (Fujii et al. 2024)."""


def candidate_layouts(cluster: Cluster, *, has_blocks: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yields layouts worth trying: words, arguments of HybridStrategy, and whether blocks are recomputed."""
    world, per_node = cluster.world_size, cluster.ranks_per_node
    shapes: list[tuple[str, dict[str, Any]]] = [("ddp", {"zero_stage": 0})]
    if world > 1:
        shapes += [(f"zero-{s}", {"zero_stage": s, "data_parallel_shard_size": world}) for s in (1, 2)]
        shapes.append((f"fsdp {world}", {"zero_stage": 3, "data_parallel_shard_size": world}))
        shards = [d for d in range(2, world) if world % d == 0 and (d % per_node == 0 or per_node % d == 0)]
        shapes += [
            (
                f"hybrid {world // d} x fsdp {d}",
                {"zero_stage": 3, "data_parallel_replicate_size": world // d, "data_parallel_shard_size": d},
            )
            for d in shards
        ]
        offloaded = {"zero_stage": 3, "data_parallel_shard_size": world, "cpu_offload": True}
        shapes.append((f"fsdp {world}, cpu offload", offloaded))
    for words, arguments in shapes:
        yield words, arguments, False
        if has_blocks:
            yield f"{words}, recompute full", arguments, True


def judge(layout: str, arguments: dict[str, Any], estimate: Estimate, fill: float = FILL) -> Candidate:
    """Returns the candidate with the reason why it will not do, if there is one."""
    assert estimate.device is not None
    limit = estimate.device.memory_bytes * fill
    worst, rejected = estimate.worst, None
    if worst.total > limit:
        terms = {
            name: getattr(worst, name) or 0
            for name in ("parameters", "gradients", "optimizer", "activations", "gather_buffers")
        }
        most = max(terms, key=lambda name: terms[name])
        rejected = (
            f"needs {format_bytes(worst.total)} on rank {estimate.worst_rank}, more than {fill:.0%} of "
            f"{format_bytes(estimate.device.memory_bytes)}; most of it {most.replace('_', ' ')} "
            f"({format_bytes(terms[most])})"
        )
    return Candidate(layout=layout, arguments=arguments, estimate=estimate, rejected=rejected)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns those that fit, the fastest by the roofline first, then those that do not, the smallest first."""

    def key(candidate: Candidate) -> tuple[bool, bool, float, float, int]:
        estimate = candidate.estimate
        if estimate is None:
            return True, True, float("inf"), float("inf"), 0
        seconds = estimate.roofline.seconds if estimate.roofline else 0.0
        talk = sum(each.sent_per_rank for each in estimate.traffic)
        offloaded = estimate.worst.host > 0  # moves every parameter over the host's bus: a last resort
        if candidate.rejected:
            return True, False, float(estimate.worst.total), 0.0, 0
        return False, offloaded, seconds, float(talk), estimate.worst.total

    return sorted(candidates, key=key)
