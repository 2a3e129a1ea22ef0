"""What is known of the tensors while a trace is gone through: the factors of each dim, and who used which weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_axes import Axis, Factor, Factors, axes, is_live, mark, stop, unify
from lightning_pardist.describe.roles_trace import Event, Trace


@dataclass
class Tag:
    """The factors of one tensor's dims."""

    dims: list[Factors]
    weights: frozenset[str] = frozenset()
    """Names of the parameters that it is made of, and of nothing else; empty for an activation."""


@dataclass
class Use:
    """A call of a linear layer."""

    weights: frozenset[str]
    into: Factors
    """What it contracts, as the activation has it."""
    made: Factors
    """Its output features."""
    is_row: bool


@dataclass
class Lookup:
    """A call of an embedding."""

    weights: frozenset[str]
    on_batch: bool


@dataclass
class State:
    """The tags at one point of the trace."""

    trace: Trace
    not_open: Mapping[str, str]
    """Weights of linear layers that are not sharded by their output features, as an earlier pass found, with why."""
    parameters: dict[str, tuple[Axis, ...]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    unknown: dict[str, Event] = field(default_factory=dict)
    """Functions without a rule that met a dim which could have been sharded, with the first such call."""
    scored: list[Axis] = field(default_factory=list)
    """Axes over which a cross entropy was taken, or that left the module."""
    _tags: dict[int, Tag] = field(default_factory=dict)
    _on_use: dict[int, tuple[Factors, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, parameter in self.trace.parameters.items():
            self.parameters[name] = tuple(Axis(size) for size in parameter.shape)
            dims: list[Factors] = [(axis,) for axis in self.parameters[name]]
            self._tags[id(parameter)] = Tag(dims, frozenset([name]))

    def tag(self, tensor: torch.Tensor) -> Tag:
        """Returns the tensor's tag; a plain one for a tensor that no parameter went into."""
        if id(tensor) in self._on_use:
            stop(*self._on_use[id(tensor)])
        if id(tensor) not in self._tags:
            self._tags[id(tensor)] = Tag([(int(size),) for size in tensor.shape])
        return self._tags[id(tensor)]

    def put(self, tensor: torch.Tensor, dims: Sequence[Factors], weights: frozenset[str] = frozenset()) -> None:
        """Notes a result."""
        assert len(dims) == tensor.dim(), (len(dims), tensor.shape)
        self._tags[id(tensor)] = Tag(list(dims), weights)

    def stop_on_use(self, tensor: torch.Tensor, factors: Iterable[Factor], reason: str) -> None:
        """Stops factors if the tensor is ever used."""
        self._on_use[id(tensor)] = (tuple(factors), reason)

    def weights_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Returns the parameters that a result is made of; empty if anything but parameters and constants is in it."""
        names: set[str] = set()
        for tensor in tensors:
            found = self.tag(tensor).weights
            if not found and tensor.numel() != 1 and id(tensor) not in self.trace.constants:
                return frozenset()
            names |= found
        return frozenset(names)

    def stop_dim(self, tag: Tag, dim: int, reason: str) -> None:
        """Forbids to shard a dim."""
        stop(tag.dims[dim], reason)

    def pin_dim(self, tag: Tag, dim: int, reason: str) -> None:
        """Forbids to shard a dim, and whatever this very tensor is combined with later."""
        tag.dims[dim] = pinned(tag.dims[dim], reason)

    def broadcast(self, tensors: Sequence[torch.Tensor], shape: Sequence[int]) -> list[Factors]:
        """Returns the dims of an elementwise result; makes the dims of the tensors agree."""
        return self.broadcast_tags([(self.tag(tensor).dims, tensor.shape) for tensor in tensors], shape)

    def broadcast_tags(
        self, operands: Sequence[tuple[Sequence[Factors], Sequence[int]]], shape: Sequence[int]
    ) -> list[Factors]:
        """Returns ``broadcast`` for (dims, shape) of each operand."""
        result: list[Factors] = []
        for index in range(len(shape)):
            from_right = len(shape) - index
            merged: Factors | None = None
            for dims, sizes in operands:
                if from_right > len(sizes) or sizes[-from_right] == 1:
                    continue
                assert sizes[-from_right] == shape[index], "not an elementwise result"
                merged = dims[-from_right] if merged is None else unify(merged, dims[-from_right])
            result.append((shape[index],) if merged is None else merged)
        return result

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes that tensors leave the module."""
        for tensor in tensors:
            for dim in self.tag(tensor).dims:
                self.score(dim, "it leaves the module")

    def score(self, factors: Factors, reason: str) -> None:
        """Notes that a loss was taken over a dim."""
        self.scored += axes(factors)
        stop(factors, reason)

    def give_up(self, event: Event, reason: str) -> None:
        """Stops every dim of every input of a call that has no rule, and calls the results plain."""
        for tensor in tensors_in((event.args, event.kwargs)):
            for dim in self.tag(tensor).dims:
                if any(is_live(axis) for axis in axes(dim)):
                    self.unknown.setdefault(event.name, event)
                stop(dim, reason)
        for tensor in tensors_in(event.out):
            self.put(tensor, [(int(size),) for size in tensor.shape])

    def contract_weight(
        self, activation: Factors, weight_in: Factors, weight_out: Factors, names: frozenset[str]
    ) -> None:
        """Notes a linear layer: row if its input is sharded, else column.

        Args:
            activation: the contracted factors of the activation.
            weight_in: those of the weight.
            weight_out: the weight's output features.
            names: the parameters that the weight is made of.
        """
        is_row = any(is_live(axis) for axis in axes(activation))
        if is_row:
            unify(activation, weight_in)
            mark(activation, closed=True)
            stop(weight_out, "it is the output of a row linear, which is whole on every rank")
        elif reasons := [self.not_open[name] for name in sorted(names) if name in self.not_open]:
            stop(weight_out, reasons[0])
        else:
            mark(weight_out, opened=True)
        self.uses.append(Use(names, activation, weight_out, is_row))


def pinned(factors: Factors, reason: str) -> Factors:
    """Returns the factors, stopped, with axes in place of plain ones, so that what they meet is stopped too."""
    result: list[Factor] = []
    for factor in factors:
        result.append(Axis(factor) if isinstance(factor, int) else factor)
    stop(result, reason)
    return tuple(result)


Rule = Callable[[State, Event], None]
RULES: dict[str, Rule] = {}
"""Function name -> what it does to the dims of its arguments."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for functions of these names, several of which may be in one string."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(" ".join(names).split(), function))
        return function

    return register


def argument(event: Event, position: int, *names: str, default: object = None) -> object:
    """Returns an argument of a call, however it was passed."""
    if position < len(event.args):
        return event.args[position]
    return next((event.kwargs[name] for name in names if name in event.kwargs), default)


def results(event: Event) -> Iterator[torch.Tensor]:
    """Yields the tensors that a call returned."""
    yield from tensors_in(event.out)
