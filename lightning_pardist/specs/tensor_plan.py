"""The tensor-parallel plan that was made of a module's roles: what each rank of the tensor axis holds.

The words for a weight are those of ``tensor_roles``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_pardist.specs.tensor_roles import ShardCall, ShardedDim, TensorRole, TermKind


@dataclass(frozen=True, kw_only=True)
class TensorPlanEntry:
    """One line of a plan: weights of like blocks."""

    pattern: str
    """Module name with ``*`` for the index of a block, such as ``"model.layers.*.mlp.up_proj"``."""
    role: TensorRole
    source: Literal["explicit", "module", "derived"]
    names: tuple[str, ...]
    """Names of the weights it stands for."""
    parts: tuple[int, ...] = ()
    heads: str = ""
    """``"32 query, 8 key-value"`` in an attention, else empty."""
    note: str = ""
    """Why it is replicated, or what the size of the axis makes of it."""


@dataclass(frozen=True, kw_only=True)
class RegionFit:
    """How a region's units fall on the ranks, for all regions alike."""

    pattern: str
    """The region's closing layers, with ``*`` for block indices."""
    units: int
    query_heads: int | None
    key_value_heads: int | None
    is_even: bool
    key_value_copies: int
    """Ranks that must share (replicate) one key-value head: 1 if there are enough heads."""
    shards: tuple[int, ...]
    """Units, or query heads where there are fewer key-value heads than ranks, per rank."""


@dataclass(frozen=True, kw_only=True)
class SequenceStack:
    """Blocks between which the hidden state is sharded over the sequence."""

    blocks: tuple[str, ...]
    hidden: str
    """Which argument of a block the hidden state is: ``"0"`` for the first, or a name."""
    dim: int
    """Of the positions."""
    around_regions: tuple[str, ...] = ()
    """The smallest modules inside the blocks around a region; their code sees all positions."""


@dataclass(frozen=True, kw_only=True)
class RegionShare:
    """How many units of a region each rank holds."""

    units: int
    shares: tuple[int, ...]
    """By rank; they sum to ``units`` if ``copies`` is 1."""
    copies: int = 1
    """Ranks in a row that hold the same unit and share what it holds several of."""

    def local_length(self, length: int, kind: TermKind, rank: int) -> int:
        """Returns how much of a stretch a rank holds."""
        if kind == "whole":
            return length
        if kind == "times":
            return length // self.copies
        per_unit = length // self.units
        return per_unit * self.shares[rank] // (self.copies if kind == "sub" else 1)

    def local_start(self, length: int, kind: TermKind, rank: int) -> int:
        """Returns where in a stretch the part of a rank begins."""
        if kind == "whole":
            return 0
        per_unit = length // self.units
        if self.copies == 1:
            return per_unit * sum(self.shares[:rank])
        start = per_unit * (rank // self.copies)
        return start + (per_unit // self.copies) * (rank % self.copies) if kind == "sub" else start

    def local_size(self, dim: ShardedDim, rank: int) -> int:
        """Returns the length of one period of a dim on a rank."""
        return sum(self.local_length(length, kind, rank) for length, kind in dim.terms)

    def stretches(self, terms: Sequence[tuple[int, TermKind]], rank: int) -> tuple[tuple[int, int], ...]:
        """Returns (start, length) of what a rank holds of a dim, in order."""
        found, position = [], 0
        for length, kind in terms:
            held = self.local_length(length, kind, rank)
            if held:
                found.append((position + self.local_start(length, kind, rank), held))
            position += length
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """A parameter that is sharded on the tensor axis."""

    parameter: str
    dim: int
    length: int
    """Of the whole dim."""
    stretches: tuple[tuple[tuple[int, int], ...], ...]
    """By rank: (start, length) of what it holds of the dim, in order."""

    @property
    def is_even(self) -> bool:
        """True if the ranks hold equal parts, one after another, as ``Shard(dim)`` means."""
        size = len(self.stretches)
        part = self.length // size
        return (
            all(held == ((rank * part, part),) for rank, held in enumerate(self.stretches))
            and part * size == self.length
        )

    def local_length(self, rank: int) -> int:
        """Returns how long the dim is on a rank."""
        return sum(length for _, length in self.stretches[rank])


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The tensor-parallel plan of a module for an axis of some size."""

    module_class: str
    size: int
    entries: tuple[TensorPlanEntry, ...]
    fits: tuple[RegionFit, ...]
    notes: tuple[str, ...] = ()
    layouts: tuple[TensorLayout, ...] = ()
    uses: tuple[tuple[str, TensorRole], ...] = ()
    """Parameter name -> what a linear layer or lookup with it is; weights that are replicated are left out."""
    shares: tuple[RegionShare | None, ...] = ()
    """By region; None for a region that is left alone."""
    calls: tuple[ShardCall, ...] = ()
    """Of the regions that are sharded."""
    quiet_modules: tuple[str, ...] = ()
    partial_parameters: tuple[str, ...] = ()
    """Whole parameters whose gradient is a sum over the ranks."""
    exchanges: tuple[tuple[str, int], ...] = ()
    """Parameter and bytes of every sum of a forward and backward pass, for the described batch."""
    region_members: tuple[tuple[str, ...], ...] = ()
    """By region, the modules that hold its parameters or make its calls."""
    sequence_stacks: tuple[SequenceStack, ...] = ()
    """Empty without sequence parallel."""
    loss_parallel: bool = True
    """Logits over a sharded vocabulary stay sharded until somebody asks for whole ones."""

    def role_of(self, name: str) -> TensorRole:
        """Returns the role of a weight by its name."""
        return next(entry.role for entry in self.entries if name in entry.names)

    @property
    def is_empty(self) -> bool:
        """True if nothing would be sharded."""
        return all(entry.role == "replicate" for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain containers and words, fit for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """Returns the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def fingerprint(self) -> str:
        """Returns a short digest that differs if any part of the plan differs."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()
