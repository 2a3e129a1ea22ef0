"""Joins the terms into one estimate.

A first version: bytes and counts are exact; times are a roofline, the peaks of data sheets with everything overlapped.
Ring bytes per rank of n bytes on an axis of d ranks: all-gather and reduce-scatter n (d - 1) / d, all-reduce twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pardist.base import axes
from lightning_pardist.plan.memory import Held, memory_by_rank
from lightning_pardist.plan.rank_traffic import traffic_by_rank
from lightning_pardist.specs.config import AxisSizes
from lightning_pardist.specs.device import Device
from lightning_pardist.specs.estimate import AxisTraffic, Estimate, Roofline
from lightning_pardist.specs.parallel_plan import Traffic


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
    return Estimate(
        plan=held.plan,
        world_size=cluster.world_size,
        num_nodes=cluster.num_nodes,
        memory_by_rank=memory,
        worst_rank=max(range(len(memory)), key=lambda rank: memory[rank].total + memory[rank].host),
        traffic_by_rank=traffic,
        busiest_rank=max(range(len(traffic)), key=lambda rank: _weight(traffic[rank])),
        work=held.work,
        idle_share=held.idle_share,
        batch_rows=held.profile.batch_rows,
        device=cluster.device,
        roofline=_roofline(held, traffic, cluster),
        assumptions=tuple(assumptions),
    )


def axis_traffic(held: Held, cluster: Cluster) -> tuple[tuple[AxisTraffic, ...], ...]:
    """Returns the collectives of every rank with what they mean for the links."""
    known: dict[tuple[Traffic, ...], tuple[AxisTraffic, ...]] = {}
    found = []
    for traffic in traffic_by_rank(held):
        if traffic not in known:
            known[traffic] = tuple(_on_links(each, held.plan.sizes, cluster) for each in traffic)
        found.append(known[traffic])
    return tuple(found)


def _weight(traffic: Sequence[AxisTraffic]) -> tuple[float, int]:
    return sum(each.seconds or 0.0 for each in traffic), sum(each.sent_per_rank for each in traffic)


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
    ways = len(traffic.members) or ways
    crosses = crosses_nodes(sizes, traffic.axis, cluster.ranks_per_node)
    device = cluster.device
    speed = None
    if device is not None:
        speed = device.network_bytes_per_second if crosses else device.node_bytes_per_second
    sent = _sent(traffic, ways)
    return AxisTraffic(
        axis=traffic.axis,
        collective=traffic.collective,
        count=traffic.count,
        nbytes=traffic.nbytes,
        sent_per_rank=sent,
        crosses_nodes=crosses,
        ranks=2 if traffic.collective in ("send", "receive") else ways,
        seconds=None if speed is None else sent / speed,
    )


def _sent(traffic: Traffic, ways: int) -> int:
    if traffic.collective in ("send", "receive"):
        return traffic.nbytes if traffic.collective == "send" else 0
    rounds = 2 if traffic.collective == "all_reduce" else 1
    return rounds * traffic.nbytes * (ways - 1) // ways


def _roofline(held: Held, traffic: Sequence[Sequence[AxisTraffic]], cluster: Cluster) -> Roofline | None:
    """Returns the bound; a pipeline's ranks wait for each other, so its busy time is stretched by the idle share."""
    device = cluster.device
    if device is None:
        return None
    is_16 = "16" in held.plan.precision.name
    peak = device.flops_16 if is_16 else device.flops_32
    if peak is None or any(each.seconds is None for ranks in traffic for each in ranks):
        return None
    flops = sum(each.flops_forward + each.flops_backward for each in held.work) / len(held.work)
    return Roofline(
        compute_seconds=flops / (1 - held.idle_share) / peak,
        communication_seconds=max(_weight(each)[0] for each in traffic),
    )
