"""How values flow between blocks (``Dataflow``), and what each stage holds and does (``PipelinePlan``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

Value = tuple[int, int]
"""``(block, leaf)``: a tensor among the outputs of a block; both are counted from zero, blocks in call order."""
Action = tuple[int, str, int]
"""``(stage, kind, micro-batch)``; kinds are F (forward), B (backward), I and W (backward of inputs, of weights), and O
(a forward that is one with the backward after it: what it gives is sent when both have ended)."""
Orders = Mapping[int, tuple[Action, ...]]
"""What every rank of the pipeline computes, in order."""


@dataclass(frozen=True)
class Leaf:
    """A tensor among a block's outputs, as a step is foretold to give it."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    passes: int | None = None
    """It is the block's input tensor of this number, given back as it came."""
    same: int | None = None
    """It is the tensor of an earlier leaf once more."""

    is_nested_leaf: ClassVar[bool] = True


@dataclass(frozen=True)
class Outputs:
    """What a block gives back."""

    structure: Any
    """With a ``Leaf`` in place of every tensor."""
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the code of one target (a block's inputs, or all that follows the last block) is computed from.

    Code outside of blocks is run again wherever its results are needed, so these are parameters of such code and
    outputs of blocks, never values in between.
    """

    parameters: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()
    insides: tuple[int, ...] = ()
    """Blocks of which it reads a tensor that is not among their outputs: no cut can lie between them and the target."""


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """How one step's values flow between blocks."""

    blocks: tuple[str, ...]
    """Names of the blocks in call order."""
    order: tuple[int, ...]
    """Of the blocks that this step called, by first call; ascending where it calls them as ``blocks`` says."""
    needs: tuple[Needs, ...]
    """By block; the last entry is of the code after the last block."""
    used_parameters: tuple[tuple[str, ...], ...]
    """By block: parameters used while it ran, wherever they are registered."""
    calls: tuple[int, ...]
    """By block: how often it ran."""
    opaque: tuple[str | None, ...]
    """By block: the kind of an output that is no tensor and no plain value, if there is one."""
    written_buffers: tuple[tuple[str, int], ...] = ()
    """Buffers that the step writes, with the block (or the next block, for code outside) that does."""
    rewritten: tuple[Value, ...] = ()
    """Outputs of blocks whose memory code outside of blocks writes to, after their blocks have returned them."""
    draws_random: bool = False
    """An operator of the step draws random numbers."""

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """Returns the outputs of blocks before ``cut`` that anything from block ``cut`` on is computed from."""
        targets = range(cut, len(self.blocks) + 1)
        return tuple(sorted({v for target in targets for v in self.needs[target].values if v[0] < cut}))

    def needed_by(self, first: int, stop: int) -> tuple[str, ...]:
        """Returns the parameters that blocks ``first .. stop - 1`` use, and the code that makes their inputs.

        With the last block, those of the code after it as well.
        """
        targets = [*range(first, stop), *([stop] if stop == len(self.blocks) else [])]
        names = dict.fromkeys(name for target in targets for name in self.needs[target].parameters)
        names.update(dict.fromkeys(name for block in range(first, stop) for name in self.used_parameters[block]))
        return tuple(names)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage."""

    index: int
    rank: int
    """Its place along the pipeline axis."""
    first: int
    stop: int
    """Its blocks are ``first .. stop - 1``, in call order."""
    blocks: tuple[str, ...]
    parameters: tuple[str, ...]
    """All that it needs, first names."""
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    flops: int
    """Forward and backward for the profiled batch, with the code around the blocks."""
    parameter_bytes: int
    activation_bytes: int
    """Kept from forward to backward, for the profiled batch."""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The whole pipeline."""

    schedule: str
    ranks: int
    num_microbatches: int
    """For a batch of the profiled size; a smaller one is cut into fewer parts."""
    blocks: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    idle_blocks: tuple[str, ...] = ()
    """Blocks of a stack that the described step did not call; their parameters live on the first stage."""
    shared_parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Parameters that several ranks hold, with those ranks: their gradients are summed."""
    foreign_buffers: tuple[tuple[str, int], ...] = ()
    """Buffers that one rank alone keeps up to date, with that rank."""
    rewritten: tuple[Value, ...] = ()
    """Outputs of blocks that code outside of blocks writes to in a training step."""
    draws_random: bool = False
    idle_share: float = 0.0
    """Foretold share of a step in which ranks wait, all forwards taken as equal."""
    alive: float = 0.0
    """Foretold micro-batches whose activations the rank with most of them keeps at once."""
    balance: float = 1.0
    """Largest over mean cost of the stages."""
    timeline: tuple[str, ...] = ()
    """One line of text per rank, one letter per unit of time."""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def loss_rank(self) -> int:
        """The rank of the last stage."""
        return self.stages[-1].rank

    def stages_of(self, rank: int) -> tuple[StagePlan, ...]:
        """Returns the stages of one rank of the pipeline, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def held_by(self, rank: int) -> frozenset[str]:
        """Returns the names of the parameters that a rank of the pipeline holds."""
        return frozenset(name for stage in self.stages_of(rank) for name in stage.parameters)

    def stage_of(self, block: int) -> StagePlan:
        """Returns the stage that owns a block."""
        return next(stage for stage in self.stages if stage.first <= block < stage.stop)
