"""What ``describe`` finds out about a module and one batch: the input of every planner.

Phases. A training step of a model with one block stack runs ``prefix -> block 0 .. block N-1 -> suffix``. With several
stacks (encoder and decoder) what runs between them is ``between``. A parameter may be used in several phases: a tied
embedding is used in the prefix and in the suffix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

PREFIX = "prefix"
BETWEEN = "between"
SUFFIX = "suffix"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor that enters or leaves a block."""

    name: str
    """Argument name, or position (``"0"``), with a path into containers (``"position_embeddings.0"``)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    origin: str
    """Where its storage was last written: a batch path (``"batch.input_ids"``), a phase (``"prefix"``, a block's name,
    ``"between"``), ``"parameter:<name>"`` for a parameter handed over, or ``"constant"`` (a buffer, an attribute)."""
    depends_on: tuple[str, ...] = ()
    """Phases whose parameters went into its value, in order; empty for one computed from batch and buffers alone."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return _numel(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ParameterProfile:
    """One parameter, once, whatever number of names it has."""

    name: str
    """Its first name in ``named_parameters()`` order."""
    aliases: tuple[str, ...]
    """Its other names: more than none means tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    phases: tuple[str, ...]
    """Phases that use it, in order of first use; a block's phase is its module name. Empty: never used in the step."""
    is_reached: bool = True
    """False if it was used and got no gradient all the same: its results only choose, or are detached."""
    users: tuple[str, ...] = ()
    """Names of the modules whose forward was the innermost one running when it was used, in order of first use."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return _numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.dtype.itemsize

    @property
    def is_tied(self) -> bool:
        """True if two or more names, or two or more phases outside one block, share it."""
        return bool(self.aliases)


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """What one phase costs for the profiled batch."""

    flops_forward: int = 0
    flops_backward: int = 0
    saved_activation_bytes: int = 0
    """Bytes that autograd keeps from forward to backward, parameters excluded, each storage counted once."""


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block of a stack."""

    name: str
    """Module name from the root, such as ``"model.h.3"``."""
    index: int
    class_name: str
    parameter_names: tuple[str, ...]
    """First names of the parameters that live in the block."""
    cost: PhaseCost
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    calls: int
    """How often the block ran in one step (0 if the run did not reach it)."""


@dataclass(frozen=True, kw_only=True)
class StackProfile:
    """A container of like blocks that are called one after another."""

    name: str
    """Module name of the container, such as ``"model.h"``."""
    blocks: tuple[BlockProfile, ...]
    """In call order."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Everything the planners know about a module."""

    module_class: str
    source: Literal["fake_run", "module_tree"]
    """``module_tree`` is the fallback: costs, phases, inputs and outputs are then unknown (zero or empty)."""
    fallback_reason: str | None
    """Why the fake run could not finish, with the line that ended it; None if it finished."""
    parameters: tuple[ParameterProfile, ...]
    buffer_bytes: int
    stacks: tuple[StackProfile, ...]
    """In call order; empty for a module without a stack."""
    prefix: PhaseCost = field(default_factory=PhaseCost)
    between: PhaseCost = field(default_factory=PhaseCost)
    suffix: PhaseCost = field(default_factory=PhaseCost)
    called_modules: tuple[str, ...] | None = None
    """Names of the modules whose forward ran in the step, in order of first call; None if no run finished."""
    batch_rows: int | None = None
    """Samples in the profiled batch (size of dim 0 of its first tensor), or None if unknown."""
    batch_tokens: int | None = None
    """Rows times sequence length if the first integer tensor of the batch is 2-D, else None."""
    entry: Literal["training_step", "forward"] = "training_step"
    assumptions: tuple[str, ...] = ()
    """What the run took for granted where code read values from tensors, with the lines; empty in most models."""
    seconds: float = 0.0
    """How long describing took."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, ties counted once."""
        return sum(p.numel for p in self.parameters)

    @property
    def flops_forward(self) -> int:
        """FLOPs of the forward part of the step for the profiled batch."""
        return sum(cost.flops_forward for cost in self._costs())

    @property
    def flops_backward(self) -> int:
        """FLOPs of the backward part of the step for the profiled batch."""
        return sum(cost.flops_backward for cost in self._costs())

    @property
    def saved_activation_bytes(self) -> int:
        """Bytes kept from forward to backward, without recomputation."""
        return sum(cost.saved_activation_bytes for cost in self._costs())

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Trainable parameters that get no gradient in the step; empty when the run did not finish."""
        if self.source != "fake_run":
            return ()
        return tuple(p.name for p in self.parameters if p.requires_grad and not (p.phases and p.is_reached))

    def blocks(self) -> Iterator[BlockProfile]:
        """All blocks of all stacks in the order of their first calls, which may go to and fro between stacks.

        Blocks that the run did not reach come last; without a run the order is that of the stacks.
        """
        called = {name: place for place, name in enumerate(self.called_modules or ())}
        blocks = (block for stack in self.stacks for block in stack.blocks)
        yield from sorted(blocks, key=lambda block: called.get(block.name, len(called)))

    def called_blocks(self) -> tuple[BlockProfile, ...]:
        """Those of ``blocks()`` that the step called."""
        return tuple(block for block in self.blocks() if block.calls)

    def _costs(self) -> Iterator[PhaseCost]:
        yield from (self.prefix, self.between, self.suffix)
        yield from (block.cost for block in self.blocks())


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
