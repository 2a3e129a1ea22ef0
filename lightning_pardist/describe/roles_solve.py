"""From a trace to roles: goes through it until every linear layer that opens a region sees it closed.

A linear layer that opens a region (column) which is stopped or never closed is replicated, and the trace is gone
through again with that knowledge, because the linear layer after it may now open one. Only more layers are found to be
replicated each time, so this ends; two to four passes are usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_pardist.describe.roles_axes import Axis, all_axes, axes, expand, find, shard_parts, size_of
from lightning_pardist.describe.roles_blocks import stack_probes
from lightning_pardist.describe.roles_calls import quiet_modules, shard_calls
from lightning_pardist.describe.roles_contractions import contract
from lightning_pardist.describe.roles_exchanges import exchanges
from lightning_pardist.describe.roles_partial import added_biases, partial_parameters
from lightning_pardist.describe.roles_probes import region_members, region_probes
from lightning_pardist.describe.roles_reductions import normalisation
from lightning_pardist.describe.roles_shapes import elementwise
from lightning_pardist.describe.roles_sharing import Sharing
from lightning_pardist.describe.roles_state import RULES, State, Use
from lightning_pardist.describe.roles_trace import Event, Trace
from lightning_pardist.specs.model_profile import StackProfile
from lightning_pardist.specs.tensor_roles import ShardedParameter, TensorRegion, TensorRole, TensorRoles, WeightRole

_RULES_ARE_LOADED = (contract, elementwise, normalisation)
"""The modules of rules fill ``RULES`` when they are imported."""


def solve(trace: Trace, module: nn.Module, stacks: Sequence[StackProfile]) -> TensorRoles:
    """Returns the roles of all weights that the trace used in a linear layer or an embedding.

    Args:
        trace: of one step.
        module: whose step it was; its class and those inside are looked at only.
        stacks: of its blocks.
    """
    reasons: dict[str, str] = {}
    unknown: dict[str, Event] = {}
    while True:
        state = _pass(trace, reasons)
        unknown = state.unknown | unknown
        chosen = _chosen(state.uses)
        failed = _failures(state, chosen, reasons)
        if not failed:
            # The last pass does not reach what has made the layers before it whole.
            state.unknown |= {n: e for n, e in unknown.items() if any(f" {n}" in why for why in reasons.values())}
            return _Assembler(trace, state, chosen, reasons).roles(module, stacks)
        reasons |= failed


def _pass(trace: Trace, not_open: Mapping[str, str]) -> State:
    state = State(trace, not_open)
    for event in trace.events:
        _apply(state, event)
    state.leave(trace.outputs)
    return state


def _apply(state: State, event: Event) -> None:
    found = RULES.get(event.name)
    if found is None:
        state.give_up(event, f"it goes through {event.name}, which has no rule")
        return
    try:
        found(state, event)
    except (NotImplementedError, AssertionError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        # A form of the call that the rule does not know: as for a function without one.
        state.give_up(event, f"it goes through a form of {event.name} that has no rule")


def _is_good(axis: Axis) -> bool:
    return axis.opened and axis.closed and axis.stopped is None and not axis.cuts


def _chosen(uses: Iterable[Use]) -> frozenset[Axis]:
    """Returns the classes to shard: of each row's input the outermost, if it can be.

    An inner one (the head dim of values, where a norm over all heads forbids the heads) would be right too, but it
    would shard a fraction of the attention, with a stride, for the price of a whole region's communication.
    """
    outermost = [expand(use.into)[:1] for use in uses if use.is_row]
    return frozenset(axis for first in outermost for axis in first if isinstance(axis, Axis) and _is_good(axis))


def _failures(state: State, chosen: frozenset[Axis], known: Iterable[str]) -> dict[str, str]:
    """Returns the weights that opened a region in vain, with the reason; only the certain ones if there are any."""
    stopped: dict[str, str] = {}
    unclosed: dict[str, str] = {}
    for use in state.uses:
        for name in sorted(use.weights.difference(known)):
            if not use.is_row and sum(factor in chosen for factor in expand(use.made)) > 1:
                stopped[name] = "both the heads in its output and what lies inside them would be sharded"
            if use.is_row or _is_sharded(state, name, chosen):
                continue
            live = [axis for axis in axes(use.made) if axis.stopped is None]
            reason = next((axis.stopped for axis in axes(use.made) if axis.stopped), None)
            if not live:
                stopped[name] = reason or "its output has one feature"
            else:
                unclosed[name] = _why_not(state, name, chosen, reason)
    return stopped or unclosed or _partial(state, chosen, known)


def _why_not(state: State, name: str, chosen: frozenset[Axis], reason: str | None) -> str:
    if any(part in chosen for axis in state.parameters[name] for part in all_axes(axis)):
        return f"only a part of its output can be sharded ({reason or 'the rest has one unit'})"
    return reason or "no linear layer closes the region that it opens"


def _is_sharded(state: State, name: str, chosen: frozenset[Axis]) -> bool:
    return any(shard_parts(axis, chosen) is not None for axis in state.parameters[name])


def _partial(state: State, chosen: frozenset[Axis], known: Iterable[str]) -> dict[str, str]:
    """Returns openers whose class reaches a part of some other parameter's dim, which could not be sharded with it."""
    result: dict[str, str] = {}
    for name, dims in state.parameters.items():
        for axis in dims:
            touched = chosen.intersection(all_axes(axis))
            if touched and shard_parts(axis, chosen) is None:
                for use in state.uses:
                    if not use.is_row and touched.intersection(_classes(use.made)):
                        reason = f"it meets {name}, of which only a part could be sharded with it"
                        result.update(dict.fromkeys(use.weights.difference(known), reason))
    return result


def _classes(factors: Iterable[Axis | int]) -> Iterator[Axis]:
    for factor in factors:
        if isinstance(factor, Axis):
            yield from all_axes(factor)


class _Assembler:
    def __init__(self, trace: Trace, state: State, chosen: frozenset[Axis], reasons: dict[str, str]) -> None:
        self._trace = trace
        self._state = state
        self._chosen = chosen
        self._reasons = reasons
        self._groups = self._group_classes()
        self._sharing = Sharing(state, self._groups, [self._repeat(classes) for classes in self._groups])
        self._biases = added_biases(trace, state)

    def roles(self, module: nn.Module, stacks: Sequence[StackProfile]) -> TensorRoles:
        """Returns everything that was found."""
        linears: dict[str, None] = {}
        for use in self._state.uses:
            linears.update(dict.fromkeys(sorted(use.weights)))
        tables = {name: None for lookup in self._state.lookups for name in sorted(lookup.weights)}
        vocabulary = self._vocabulary(linears, tables)
        linears = {name: None for name in linears if self._is_weight(name)}
        weights = [self._weight(name, name in linears, vocabulary) for name in {**tables, **linears}]
        calls = tuple(shard_calls(self._trace, self._sharing, self._state))
        regions = tuple(self._region(index, classes) for index, classes in enumerate(self._groups))
        roles = TensorRoles(
            module_class=type(module).__name__,
            weights=tuple(weights),
            regions=regions,
            region_members=tuple(region_members(region, calls) for region in regions),
            probes=tuple(region_probes(self._trace, regions, calls, self._sharing)),
            calls=calls,
            exchanges=tuple(exchanges(self._trace, weights)),
            quiet_modules=quiet_modules(self._trace, calls),
            partial_parameters=tuple(partial_parameters(self._trace, self._sharing, self._state)),
            unknown_functions=tuple((n, self._trace.module_of(event)) for n, event in self._state.unknown.items()),
        )
        probes = stack_probes(module, self._trace, stacks, roles, self._sharing)
        return replace(roles, stack_probes=tuple(probes))

    def _is_weight(self, name: str) -> bool:
        """True for what is a matrix (or a stack of them); scales that a weight is made with are not."""
        return self._trace.parameters[name].dim() >= 2

    def _group_classes(self) -> list[frozenset[Axis]]:
        """Returns the classes of each region: those that a weight is sharded by together belong to one."""
        groups: list[set[Axis]] = []
        for use in self._state.uses:
            found = self._chosen.intersection(_classes(use.made), *()) | self._chosen.intersection(_classes(use.into))
            if not found:
                continue
            merged = set(found)
            place = len(groups)
            for index in [i for i, group in enumerate(groups) if group & found][::-1]:
                merged |= groups.pop(index)
                place = index
            groups.insert(place, merged)
        return [frozenset(group) for group in groups]

    def _region_of(self, name: str) -> int | None:
        found = {find(part) for axis in self._state.parameters[name] for part in all_axes(axis)} & self._chosen
        return next((index for index, classes in enumerate(self._groups) if classes & found), None)

    def _weight(self, name: str, is_linear: bool, vocabulary: dict[str, int]) -> WeightRole:
        dim, parts = self._sharded(name)
        is_row = dim is not None and any(u.is_row and name in u.weights for u in self._state.uses)
        role: TensorRole = "replicate" if dim is None else "row" if is_row else "column"
        if role == "column" and len(parts) > 1:
            role = "fused_column"
        if dim is None and name in vocabulary:
            role, dim = "vocab", vocabulary[name]
            parts = (self._trace.parameters[name].shape[dim],)
        reason = ""
        if role == "replicate":
            reason = self._reasons.get(name, "" if is_linear else "an embedding that is not over the vocabulary")
            reason = reason or "its input is not sharded where it could close a region"
        return WeightRole(
            name=name.removesuffix(".weight"),
            parameter=name,
            kind="linear" if is_linear else "embedding",
            role=role,
            shape=tuple(int(size) for size in self._trace.parameters[name].shape),
            dim=dim,
            parts=parts,
            region=self._region_of(name) if dim is not None and role != "vocab" else None,
            reason=reason,
            biases=self._biases.get(name, ()),
        )

    def _sharded(self, name: str) -> tuple[int | None, tuple[int, ...]]:
        for dim, axis in enumerate(self._state.parameters[name]):
            parts = shard_parts(axis, self._chosen)
            if parts is not None:
                return dim, parts
        return None, ()

    def _region(self, index: int, classes: frozenset[Axis]) -> TensorRegion:
        openers: dict[str, None] = {}
        closers: dict[str, None] = {}
        heads: list[int] = []
        for use in self._state.uses:
            if not classes.intersection(_classes(use.into if use.is_row else use.made)):
                continue
            (closers if use.is_row else openers).update(dict.fromkeys(sorted(use.weights)))
            if not use.is_row:
                heads += self._heads(use.made)
        return TensorRegion(
            index=index,
            openers=tuple(name.removesuffix(".weight") for name in openers if self._is_weight(name)),
            closers=tuple(name.removesuffix(".weight") for name in closers if self._is_weight(name)),
            units=min(axis.size for axis in classes),
            query_heads=max(heads, default=None),
            key_value_heads=min(heads, default=None),
            parameters=tuple(self._parameters(index)),
        )

    def _parameters(self, region: int) -> Iterator[ShardedParameter]:
        for name in self._state.parameters:
            dim, parts = self._sharded(name)
            if dim is not None and self._region_of(name) == region:
                shared = self._sharing.dim((self._state.parameters[name][dim],), dim)
                assert shared is not None
                yield ShardedParameter(name=name, dim=dim, parts=parts, terms=shared.terms)

    def _repeat(self, classes: frozenset[Axis]) -> Axis | None:
        """Returns the class that counts the query heads of one key-value head, None if each has its own."""
        units = min(axis.size for axis in classes)
        for use in self._state.uses:
            if use.is_row or not classes.intersection(_classes(use.made)):
                continue
            for part in self._leaf_parts(use.made):
                factors = expand(part)
                position = next((i for i, f in enumerate(factors) if f in self._chosen), None)
                inner = factors[position + 1 :] if position is not None else []
                if inner and isinstance(inner[0], Axis) and inner[0].stopped is None and len(inner) > 1:
                    heads = max(self._heads(use.made), default=0)
                    if heads == units * inner[0].size:
                        return inner[0]
        return None

    def _heads(self, made: Sequence[Axis | int]) -> Iterator[int]:
        """Yields the heads of each part of a projection: the units outside the dim that attention sums over."""
        for part in self._leaf_parts(made):
            factors = expand(part)
            position = next((i for i, f in enumerate(factors) if f in self._chosen), None)
            if position is None:
                continue
            inner = factors[position:]
            ends = [i for i, f in enumerate(inner) if any(part.stopped for part in _classes([f]))]
            if ends:
                yield size_of(inner[: ends[0]])

    def _leaf_parts(self, made: Sequence[Axis | int]) -> Iterator[Sequence[Axis | int]]:
        """Yields the parts of a fused projection, which may be cut several times; else the whole."""
        parts = expand(made)
        first = parts[0] if parts else None
        if isinstance(first, Axis) and first.cuts and first not in self._chosen:
            for part in first.cuts.values():
                yield from self._leaf_parts((part, *parts[1:]))
        else:
            yield parts

    # --------------------------------------------------------------------------------------------------- vocabulary

    def _vocabulary(self, linears: Iterable[str], tables: Iterable[str]) -> dict[str, int]:
        """Returns the weights over the vocabulary with their dim: heads as wide as a table is long, and such tables.

        Without a head, the tables that are indexed by the batch itself (positions are counted, not read) count.
        """
        rows = {name: self._trace.parameters[name].shape[0] for name in tables}
        scored = {find(axis) for axis in self._state.scored}
        result: dict[str, int] = {}
        for use in self._state.uses:
            for name in use.weights.intersection(linears):
                for dim, axis in enumerate(self._state.parameters[name]):
                    is_output = find(axis) in {find(f) for f in use.made if isinstance(f, Axis)}
                    if is_output and not use.is_row and axis.size in rows.values() and find(axis) in scored:
                        result[name] = dim
        lengths = {self._trace.parameters[name].shape[dim] for name, dim in result.items()}
        by_batch = {name for lookup in self._state.lookups if lookup.on_batch for name in lookup.weights}
        for name, length in rows.items():
            if length in lengths or (not lengths and name in by_batch):
                result[name] = 0
        return result
