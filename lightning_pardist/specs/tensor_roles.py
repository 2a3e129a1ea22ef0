"""What each linear layer of a module could be under tensor parallelism, and which plan was made of it.

Words for a weight: ``column`` (sharded by output features), ``row`` (by input features; its output is summed over the
ranks), ``fused_column`` (several column weights in one: each part is sharded by itself), ``vocab`` (an embedding or a
head sharded by the vocabulary), ``replicate`` (whole on every rank).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

TensorRole = Literal["column", "row", "fused_column", "vocab", "replicate"]
ROLES: tuple[TensorRole, ...] = ("column", "row", "fused_column", "vocab", "replicate")


@dataclass(frozen=True, kw_only=True)
class WeightRole:
    """The role of one weight of a linear layer or an embedding."""

    name: str
    """Name of the module that holds it (``"model.layers.0.mlp.up_proj"``), or the parameter's own where the weight is
    not called ``weight`` (``"layers.0.self_attn.in_proj_weight"``)."""
    parameter: str
    """First name of the parameter."""
    kind: Literal["linear", "embedding"]
    role: TensorRole
    shape: tuple[int, ...]
    dim: int | None
    """Which dim is sharded; None for ``replicate``. Of ``nn.Linear`` 0 for column, of GPT-2's ``Conv1D`` 1."""
    parts: tuple[int, ...] = ()
    """Sizes of the parts of that dim, each sharded by itself: one for most, three for q, k and v in one weight."""
    region: int | None = None
    """Index of the region it opens or closes."""
    reason: str = ""
    """Why it is replicated; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter with a dim that is sharded along with its region: weights, their biases, scales per head."""

    name: str
    dim: int
    parts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorRegion:
    """What lies between the linear layers that open a region and those that close it."""

    index: int
    openers: tuple[str, ...]
    """Names of the column and fused weights, in the order of use."""
    closers: tuple[str, ...]
    """Names of the row weights."""
    units: int
    """How many indivisible units the sharded axis has: key-value heads of an attention, features of an MLP."""
    query_heads: int | None = None
    """None for a region that sums over no inner dim (an MLP)."""
    key_value_heads: int | None = None
    parameters: tuple[ShardedParameter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TensorRoles:
    """Roles derived from how data flows through one forward pass; nothing was looked up by name."""

    module_class: str
    weights: tuple[WeightRole, ...]
    """In the order of first use."""
    regions: tuple[TensorRegion, ...]
    unknown_functions: tuple[str, ...] = ()
    """Functions without a rule that kept something from being sharded."""
    assumptions: tuple[str, ...] = ()
    """What the fake run took for granted."""
    seconds: float = 0.0

    def role_of(self, name: str) -> TensorRole:
        """Returns the role of a weight by its name."""
        return next(weight.role for weight in self.weights if weight.name == name)


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
class TensorPlan:
    """The tensor-parallel plan of a module for an axis of some size."""

    module_class: str
    size: int
    entries: tuple[TensorPlanEntry, ...]
    fits: tuple[RegionFit, ...]
    notes: tuple[str, ...] = ()

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
