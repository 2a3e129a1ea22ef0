"""Who writes which box, agreed once and remembered: rank 0 sees what all ranks hold and deals it out.

The metadata is torch.distributed.checkpoint's own, so its readers open the result.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.pieces import Entry

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""
Held = tuple[str, tuple[int, ...], torch.dtype, bool, tuple[Box, ...]]
"""Name, shape of the whole tensor, dtype, whether the lowest rank writes it, the boxes."""
Assignment = list[tuple[int, int]]
"""Indices (entry, piece) into a rank's own entries: what that rank writes."""


@dataclass(frozen=True)
class Holding:
    """What one rank holds, small enough to send; ``tensors`` is None if it is what the rank said last time."""

    digest: bytes
    tensors: tuple[Held, ...] | None


@dataclass(frozen=True)
class GlobalPlan:
    """The whole checkpoint's tensors and which rank writes which box."""

    assignments: list[Assignment]
    """One per rank."""
    owners: dict[str, list[tuple[int, int, int]]]
    """Per name ``(rank, entry, piece)`` of the writers, in order of the boxes' offsets."""
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def metadata(self, holdings: list[tuple[Held, ...]]) -> Metadata:
        """Returns a fresh copy of torch's description of the tensors, without where they lie."""
        tensors: dict[str, Any] = {}
        for name, (shape, dtype) in self.sizes.items():
            chunks = []
            for rank, entry, piece in self.owners[name]:
                offset, size = holdings[rank][entry][4][piece]
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        return Metadata(state_dict_metadata=tensors)


class Planner:
    """Makes the plan of a save; saves of the same tensors in the same layout reuse it."""

    def __init__(self) -> None:
        self._sent: bytes | None = None
        self._known: list[tuple[Held, ...]] = []
        self._digests: list[bytes] = []
        self._plan: GlobalPlan | None = None

    def holding(self, entries: list[Entry]) -> Holding:
        """Returns this rank's part of the talk: what it holds, or "as last time"."""
        tensors = tuple(
            (e.name, e.shape, e.dtype, e.lowest_rank_writes, tuple((p.offset, tuple(p.view.shape)) for p in e.pieces))
            for e in entries
        )
        digest = hashlib.blake2b(pickle.dumps(tensors), digest_size=16).digest()
        same, self._sent = digest == self._sent, digest
        return Holding(digest, None if same else tensors)

    def forget(self) -> None:
        """Drops what was agreed, after a failure: ranks may remember different things."""
        self._sent, self._known, self._digests, self._plan = None, [], [], None

    def plan(self, holdings: list[Holding]) -> tuple[GlobalPlan, list[tuple[Held, ...]]]:
        """Returns the plan and what all ranks hold. Rank 0 only.

        Raises:
            ValueError: if two ranks disagree about a tensor, or no rank holds some part of it.
        """
        digests = [holding.digest for holding in holdings]
        if self._plan is None or digests != self._digests:
            held = [self._known[rank] if h.tensors is None else h.tensors for rank, h in enumerate(holdings)]
            self._plan, self._known, self._digests = make_plan(held), held, digests
        return self._plan, self._known


def make_plan(held: list[tuple[Held, ...]]) -> GlobalPlan:
    """Deals out every box once: to the lowest rank where asked, else to the rank with the least to write so far."""
    candidates: dict[tuple[str, Box], list[tuple[int, int, int]]] = {}
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    lowest: set[str] = set()
    for rank, tensors in enumerate(held):
        for entry, (name, shape, dtype, lowest_rank_writes, boxes) in enumerate(tensors):
            if sizes.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise ValueError(_disagreement(name, sizes[name], (shape, dtype), rank))
            if lowest_rank_writes:
                lowest.add(name)
            for piece, box in enumerate(boxes):
                candidates.setdefault((name, box), []).append((rank, entry, piece))
    load = [0] * len(held)
    assignments: list[Assignment] = [[] for _ in held]
    owners: dict[str, list[tuple[int, int, int]]] = {name: [] for name in sizes}
    covered = dict.fromkeys(sizes, 0)
    for (name, (_, size)), holders in candidates.items():
        chosen = holders[0] if name in lowest else min(holders, key=lambda holder: load[holder[0]])
        rank, entry, piece = chosen
        covered[name] += math.prod(size)
        load[rank] += max(math.prod(size) * sizes[name][1].itemsize, 1)
        assignments[rank].append((entry, piece))
        owners[name].append(chosen)
    for name, (shape, _) in sizes.items():
        if covered[name] != math.prod(shape):
            raise ValueError(_uncovered(name, shape, covered[name]))
        owners[name].sort(key=lambda owner: held[owner[0]][owner[1]][4][owner[2]])
    return GlobalPlan([sorted(assignment) for assignment in assignments], owners, sizes)


def _disagreement(name: str, first: object, other: object, rank: int) -> str:
    return message(
        "All ranks that hold a tensor must agree on its whole shape and dtype.",
        got=f"{name}: {first} on a lower rank, {other} on rank {rank}",
        source="the module and optimizers of each rank",
        change="build the same module on every rank, or give different tensors different names",
    )


def _uncovered(name: str, shape: tuple[int, ...], covered: int) -> str:
    return message(
        "The ranks together must hold every element of a tensor exactly once, copies aside.",
        got=f"{name} of shape {shape} has {math.prod(shape)} elements, the ranks' boxes {covered}",
        source="the module and optimizers of each rank",
        change="save with every rank of the layout taking part",
    )
