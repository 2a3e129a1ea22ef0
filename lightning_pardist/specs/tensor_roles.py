"""What each linear layer of a module could be under tensor parallelism; ``tensor_plan`` is what was made of it.

Words for a weight: ``column`` (sharded by output features), ``row`` (by input features; its output is summed over the
ranks), ``fused_column`` (several column weights in one: each part is sharded by itself), ``vocab`` (an embedding or a
head sharded by the vocabulary), ``replicate`` (whole on every rank).
"""

from __future__ import annotations

from dataclasses import dataclass
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
    biases: tuple[str, ...] = ()
    """First names of the biases that its layers add, which a tied head may have under a name of its own."""


TermKind = Literal["whole", "unit", "sub", "times"]
"""How a stretch of a dim is shared: not at all, by the region's units, or by what a unit holds several of (the query
heads of one key-value head) where there are fewer units than ranks. ``times`` is the number of these for one unit."""


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter with a dim that is sharded along with its region: weights, their biases, scales per head."""

    name: str
    dim: int
    parts: tuple[int, ...]
    terms: tuple[tuple[int, TermKind], ...] = ()
    """The same as stretches of the dim, with how each is shared; see ``ShardedDim``."""


@dataclass(frozen=True, kw_only=True)
class ShardedDim:
    """A dim of a tensor inside a region, and what it is made of: the terms repeat if something unsharded is outside."""

    dim: int
    region: int
    terms: tuple[tuple[int, TermKind], ...]
    """Length and kind of each stretch, of the whole tensor."""

    @property
    def period(self) -> int:
        """Length of all terms."""
        return sum(length for length, _ in self.terms)


@dataclass(frozen=True, kw_only=True)
class SlicedDim:
    """A slice of a dim, by its two ends."""

    dim: int
    start: int
    length: int
    before: ShardedDim
    """The dim from 0 to the start; without terms if that is nothing."""
    taken: ShardedDim


@dataclass(frozen=True, kw_only=True)
class MetTensor:
    """An argument that is whole on every rank and meets sharded ones."""

    position: int
    """Among the tensors of the call, in order."""
    dims: tuple[ShardedDim, ...]
    """Those of which a rank needs its share only."""
    needs_gradient: bool


@dataclass(frozen=True, kw_only=True)
class ShardCall:
    """One call of a torch function in a module's own forward that must be told what a rank holds."""

    module: str
    function: str
    ordinal: int
    """Among the calls of this function in one forward of the module."""
    sizes: tuple[ShardedDim, ...] = ()
    """Dims of the result whose sizes the code gives; of ``size`` and ``shape``, those that the code compares."""
    inner: tuple[tuple[int, int], ...] = ()
    """Dims of the result of a view, and their sizes, that lie inside of units: the same on a share as on the whole."""
    split_dim: int | None = None
    split: tuple[ShardedDim, ...] = ()
    """Pieces of a split or chunk along ``split_dim``."""
    slices: tuple[SlicedDim, ...] = ()
    times: ShardedDim | None = None
    """Of a repetition of key-value heads."""
    met: tuple[MetTensor, ...] = ()
    is_random: bool = False
    """It draws random numbers for sharded elements: every rank needs others."""

    @property
    def regions(self) -> frozenset[int]:
        """The regions whose shares it needs."""
        dims = [*self.sizes, *self.split, *(s.taken for s in self.slices), *(d for met in self.met for d in met.dims)]
        return frozenset(dim.region for dim in [*dims, *([self.times] if self.times is not None else [])])


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


@dataclass(frozen=True)
class TensorLeaf:
    """Stands for a tensor in the arguments of a call."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class SharedOutput:
    """A tensor that a module returns and of which each rank has its share."""

    position: int
    """Among the tensors it returns, in order."""
    shape: tuple[int, ...]
    """Of the whole."""
    dims: tuple[ShardedDim, ...]


@dataclass(frozen=True, kw_only=True)
class RegionProbe:
    """How the smallest module around a region was called, so that it can be tried alone."""

    module: str
    regions: tuple[int, ...]
    """All regions that lie inside the module as a whole."""
    parameters: tuple[str, ...]
    """What is sharded in them."""
    args: tuple[Any, ...]
    """With ``TensorLeaf`` in place of tensors; objects that hold more than plain values are None."""
    kwargs: dict[str, Any]
    shared_outputs: tuple[SharedOutput, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StackProbe:
    """What is to be tried of a stack before its hidden state is sharded over the sequence."""

    blocks: tuple[str, ...]
    between: str
    """What the code between the blocks does that cannot be done position by position; empty if nothing."""
    probes: tuple[RegionProbe, ...]
    """One block of each kind, or the module around the stack."""


@dataclass(frozen=True, kw_only=True)
class PartialParameter:
    """A whole parameter that is used on sharded tensors: a rank's gradient is its share of a sum."""

    name: str
    regions: tuple[int, ...]
    """Where."""
    is_whole_elsewhere: bool
    """It is used on whole tensors too, so that no sum would be right."""


@dataclass(frozen=True, kw_only=True)
class TensorRoles:
    """Roles derived from how data flows through one forward pass; nothing was looked up by name."""

    module_class: str
    weights: tuple[WeightRole, ...]
    """In the order of first use."""
    regions: tuple[TensorRegion, ...]
    calls: tuple[ShardCall, ...] = ()
    """What the code asks of sharded tensors by their whole sizes."""
    exchanges: tuple[tuple[str, int], ...] = ()
    """Parameter and bytes of every all-reduce that sharding it costs in one forward and backward pass."""
    quiet_modules: tuple[str, ...] = ()
    """Modules inside those that make the calls, whose own calls are counted apart."""
    partial_parameters: tuple[PartialParameter, ...] = ()
    unknown_functions: tuple[tuple[str, str], ...] = ()
    """Functions without a rule that kept something from being sharded, with the module that calls them."""
    assumptions: tuple[str, ...] = ()
    """What the fake run took for granted."""
    region_members: tuple[tuple[str, ...], ...] = ()
    """By region, the modules that hold its parameters or make its calls."""
    probes: tuple[RegionProbe, ...] = ()
    """One for each kind of region that lies inside a module."""
    stack_probes: tuple[StackProbe, ...] = ()
    seconds: float = 0.0

    def role_of(self, name: str) -> TensorRole:
        """Returns the role of a weight by its name."""
        return next(weight.role for weight in self.weights if weight.name == name)
