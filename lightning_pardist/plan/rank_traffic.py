"""What each rank sends and gathers in one optimizer step of one batch, axis by axis. Exact, padding included.

data axes      fully_shard's gathers and reductions of what the rank's stages hold (see ``costs``)
tensor axis    exchanges of activations, counted in a run of the rank's step; then one sum of gradients per dtype
pipeline axis  what crosses the cuts; then one sum per dtype of the gradients of weights that several stages hold
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lightning_pardist.base import axes
from lightning_pardist.plan.costs import step_traffic
from lightning_pardist.plan.memory import Held
from lightning_pardist.plan.rank_view import Place, RankView
from lightning_pardist.plan.tensor_costs import summed_gradients
from lightning_pardist.specs.parallel_plan import Traffic


def traffic_by_rank(held: Held) -> tuple[tuple[Traffic, ...], ...]:
    """Returns the collectives of every rank of the mesh, in the order of ranks."""
    known: dict[tuple[int, int, int], tuple[Traffic, ...]] = {}
    found = []
    for place in held.views.places():
        key = held.views.key(place)
        if key not in known:
            known[key] = tuple(_joined(_traffic(held, place)))
        found.append(known[key])
    return tuple(found)


def _traffic(held: Held, place: Place) -> Iterator[Traffic]:
    view, shard, work = held.views.at(place), place[axes.DATA_PARALLEL_SHARD], held.work_at(place)
    yield from step_traffic(view.profile, view.data_parallel, held.plan.sizes, held.plan.precision)
    yield from work.exchanges
    tensor = held.plan.tensor
    if tensor is not None:
        here = {p.name for p in view.profile.parameters}
        parameters = tuple(p for p in held.profile.parameters if p.name in here)
        for nbytes in summed_gradients(tensor, parameters, view, shard):
            yield Traffic(collective="all_reduce", axis=axes.TENSOR_PARALLEL, count=1, nbytes=nbytes)
    yield from work.passes
    yield from _shared(view, shard)


def _shared(view: RankView, shard: int) -> Iterator[Traffic]:
    """Yields the sums of gradients that several stages have a part of, with a number per weight that says who has."""
    pipeline = view.plan.pipeline
    if pipeline is None:
        return
    totals: dict[tuple[tuple[int, ...], int, object], int] = defaultdict(int)
    for name, ranks in pipeline.shared_parameters:
        if view.pipeline_rank in ranks and view.by_name[name].requires_grad:
            p = view.by_name[name]
            totals[ranks, p.dtype.itemsize, p.dtype] += view.elements(p, shard) + 1
    for (ranks, itemsize, _), elements in totals.items():
        members = ranks if len(ranks) < pipeline.ranks else ()
        yield Traffic(
            collective="all_reduce",
            axis=axes.PIPELINE_PARALLEL,
            count=1,
            nbytes=elements * itemsize,
            members=members,
        )


def _joined(found: Iterator[Traffic]) -> Iterator[Traffic]:
    """Yields one entry per kind and group."""
    totals: dict[tuple[str, str, tuple[int, ...]], Traffic] = {}
    for each in found:
        key = each.axis, each.collective, each.members
        before = totals.get(key)
        totals[key] = Traffic(
            collective=each.collective,
            axis=each.axis,
            count=each.count + (before.count if before else 0),
            nbytes=each.nbytes + (before.nbytes if before else 0),
            members=each.members,
        )
    yield from (each for each in totals.values() if each.count)
