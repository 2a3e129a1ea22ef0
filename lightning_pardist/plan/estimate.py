"""Joins the terms into one estimate, and tries layouts against each other.

A first version: bytes and counts are exact; times are a roofline, the peaks of data sheets with everything overlapped.
Ring bytes per rank of n bytes on an axis of d ranks: all-gather and reduce-scatter n (d - 1) / d, all-reduce twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pardist.base import axes
from lightning_pardist.plan.memory import Held, memory_by_rank
from lightning_pardist.plan.report import format_bytes
from lightning_pardist.specs.config import AxisSizes
from lightning_pardist.specs.device import Device
from lightning_pardist.specs.estimate import AxisTraffic, Candidate, Estimate, Roofline
from lightning_pardist.specs.parallel_plan import Traffic

FILL = 0.8
"""Share of a device's memory that a layout may fill: no run of 454 ran out below it (Fujii et al. 2024)."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the run would be."""

    world_size: int
    num_nodes: int
    device: Device | None = None

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.world_size // self.num_nodes


def make_estimate(held: Held, cluster: Cluster, assumptions: Sequence[str] = ()) -> Estimate:
    """Returns what a plan will take on a cluster."""
    memory = memory_by_rank(held)
    traffic = axis_traffic(held, cluster)
    profile = held.profile
    flops_again = held.plan.recompute.flops_again or 0
    return Estimate(
        plan=held.plan,
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        memory_by_rank=memory,
        worst_rank=max(range(len(memory)), key=lambda rank: memory[rank].total + memory[rank].host),
        traffic=traffic,
        flops_forward=profile.flops_forward,
        flops_backward=profile.flops_backward,
        flops_again=flops_again,
        batch_rows=profile.batch_rows,
        device=cluster.device,
        roofline=_roofline(held, traffic, cluster),
        assumptions=tuple(assumptions),
    )


def axis_traffic(held: Held, cluster: Cluster) -> tuple[AxisTraffic, ...]:
    """Returns the plan's collectives with what they mean for the links."""
    return tuple(_on_links(traffic, held.plan.sizes, cluster) for traffic in held.plan.traffic)


def crosses_nodes(sizes: AxisSizes, axis: str, ranks_per_node: int) -> bool:
    """Returns True if neighbours on a mesh axis are on different nodes."""
    members = axes.DATA_AXES if axis == axes.DATA_PARALLEL else (axis,)
    spans = []
    inner = 1
    for name in reversed(axes.AXES):
        size = sizes.as_dict()[name]
        if name in members and size > 1:
            spans.append(inner * size)
        inner *= size
    return any(span > ranks_per_node for span in spans)


def _on_links(traffic: Traffic, sizes: AxisSizes, cluster: Cluster) -> AxisTraffic:
    ways = sizes.data_parallel if traffic.axis == axes.DATA_PARALLEL else sizes.as_dict()[traffic.axis]
    rounds = 2 if traffic.collective == "all_reduce" else 1
    sent = rounds * traffic.nbytes * (ways - 1) // ways
    crosses = crosses_nodes(sizes, traffic.axis, cluster.ranks_per_node)
    device = cluster.device
    speed = None
    if device is not None:
        speed = device.network_bytes_per_second if crosses else device.node_bytes_per_second
    return AxisTraffic(
        axis=traffic.axis,
        collective=traffic.collective,
        count=traffic.count,
        nbytes=traffic.nbytes,
        sent_per_rank=sent,
        crosses_nodes=crosses,
        seconds=None if speed is None else sent / speed,
    )


def _roofline(held: Held, traffic: Sequence[AxisTraffic], cluster: Cluster) -> Roofline | None:
    device, profile = cluster.device, held.profile
    if device is None:
        return None
    is_16 = "16" in held.plan.precision.name
    peak = device.flops_16 if is_16 else device.flops_32
    if peak is None or any(each.seconds is None for each in traffic):
        return None
    flops = profile.flops_forward + profile.flops_backward + (held.plan.recompute.flops_again or 0)
    return Roofline(
        compute_seconds=flops / peak,
        communication_seconds=sum(each.seconds or 0.0 for each in traffic),
    )


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
