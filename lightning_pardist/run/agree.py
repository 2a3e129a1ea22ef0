"""Small exchanges by which all ranks of a run come to the same decision, over the host-side control group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_pardist.mesh import Meshes

_T = TypeVar("_T")


def gather_objects(value: _T, meshes: Meshes | None) -> list[_T]:
    """Returns every rank's value, by rank. Values must be picklable."""
    if meshes is None:
        return [value]
    values: list[_T | None] = [None] * dist.get_world_size(meshes.control)
    dist.all_gather_object(values, value, group=meshes.control)
    return values  # type: ignore[return-value]  # every slot is filled by now


def on_first_rank(work: Callable[[], _T], meshes: Meshes | None) -> _T:
    """Returns what rank 0's ``work()`` does, on all ranks; what it raises is raised on all of them."""
    found: _T | Exception | None = None
    if meshes is None or dist.get_rank() == 0:
        try:
            found = work()
        except Exception as error:  # every rank must hear of it
            found = error
    first = gather_objects(found, meshes)[0]
    if isinstance(first, Exception):
        raise first
    assert first is not None
    return first


def maxima(values: Sequence[int], meshes: Meshes | None) -> list[int]:
    """Returns the largest value over ranks at every position; one collective of 8 bytes a value."""
    if meshes is None:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=meshes.control)
    return [int(v) for v in tensor.tolist()]


def all_present(meshes: Meshes, seconds: float) -> bool:
    """Returns True if all ranks call this within ``seconds``; False where one does not come.

    For moments in which a rank cannot know what the others are doing. Needs a gloo control group, which it always is.
    If one does not come, its connection is gone afterwards: the run must end. (torch's ``monitored_barrier`` keeps its
    timeout on rank 0 only.)
    """
    group, deadline = meshes.control, time.monotonic() + seconds

    def wait(work: dist.Work | None) -> None:
        assert work is not None
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    here = torch.ones(1, dtype=torch.uint8)
    others = range(1, dist.get_world_size(group)) if dist.get_rank(group) == 0 else [0]
    try:
        if dist.get_rank(group) != 0:
            wait(dist.isend(here, group=group, group_dst=0))
        for rank in others:
            wait(dist.irecv(here, group=group, group_src=rank))
        if dist.get_rank(group) == 0:
            for rank in others:
                wait(dist.isend(here, group=group, group_dst=rank))
    except RuntimeError:
        return False
    return True
