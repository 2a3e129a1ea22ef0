"""Which dims of a tensor a region shares out, told by what its axes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_pardist.describe.roles_axes import Axis, Factor, expand, find, size_of
from lightning_pardist.describe.roles_state import State
from lightning_pardist.specs.tensor_roles import ShardedDim, TermKind

Terms = tuple[tuple[int, TermKind], ...]


class Sharing:
    """Which classes of axes are shared out, by region."""

    def __init__(self, state: State, groups: Sequence[frozenset[Axis]], repeats: Sequence[Axis | None]) -> None:
        """Starts from what was chosen.

        Args:
            state: the tags at the end.
            groups: the classes of each region.
            repeats: per region the class of query heads within a key-value head, None if there is no such thing.
        """
        self._state = state
        self._region = {axis: index for index, group in enumerate(groups) for axis in group}
        self._repeats = repeats

    def dim(self, factors: Sequence[Factor], index: int = 0) -> ShardedDim | None:
        """Returns how a dim is shared, None if it is not."""
        found = self._terms(factors)
        if found is None:
            return None
        region, terms = found
        return ShardedDim(dim=index, region=region, terms=_joined(terms))

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Returns whether a rank holds a part of the tensor only."""
        return any(self._terms(dim) is not None for dim in self._state.tag(tensor).dims)

    def dims(self, tensor: torch.Tensor) -> Iterator[ShardedDim]:
        """Yields the shared dims of a tensor."""
        for index, factors in enumerate(self._state.tag(tensor).dims):
            found = self.dim(factors, index)
            if found is not None:
                yield found

    def before(self, factors: Sequence[Factor], start: int) -> Terms:
        """Returns what lies before an offset in a dim."""
        parts = expand(factors)
        if start == 0 or not parts:
            return ()
        first, rest = parts[0], parts[1:]
        inner = size_of(rest)
        if not (isinstance(first, Axis) and first.cuts):
            return ((start, "whole"),)
        terms: list[tuple[int, TermKind]] = []
        position = 0
        for (begin, length), part in _leaves(first):
            if begin == position and begin + length <= start // inner:
                found = self._terms((part, *rest))
                terms += found[1] if found is not None else [(length * inner, "whole")]
                position += length
        assert position * inner == start, "a slice begins inside a part"
        return _joined(terms)

    def _terms(self, factors: Sequence[Factor]) -> tuple[int, list[tuple[int, TermKind]]] | None:
        parts = expand(factors)
        for index, factor in enumerate(parts):
            if not isinstance(factor, Axis):
                continue
            rest = parts[index:]
            if factor in self._region:
                region = self._region[factor]
                kind: TermKind = "sub" if self._holds_repeats(rest[1:], region) else "unit"
                return region, [(size_of(rest), kind)]
            if factor.cuts:
                found = self._cut_terms(factor, parts[index + 1 :])
                if found is not None:
                    return found
        return None

    def _cut_terms(self, axis: Axis, rest: Sequence[Factor]) -> tuple[int, list[tuple[int, TermKind]]] | None:
        terms: list[tuple[int, TermKind]] = []
        region: int | None = None
        for (_, length), part in _leaves(axis):
            found = self._terms((part, *rest))
            region = found[0] if found is not None and region is None else region
            terms += found[1] if found is not None else [(length * size_of(rest), "whole")]
        return None if region is None else (region, terms)

    def _holds_repeats(self, rest: Sequence[Factor], region: int) -> bool:
        """Returns whether the next factor counts query heads of one key-value head."""
        repeat = self._repeats[region]
        if repeat is None or not rest:
            return False
        first = rest[0]
        return first == repeat.size if isinstance(first, int) else find(first) is find(repeat)


def _leaves(axis: Axis) -> Iterator[tuple[tuple[int, int], Axis]]:
    """Yields the cuts that lie side by side, the widest where one lies in another."""
    position = 0
    for (start, length), part in sorted(axis.cuts.items(), key=lambda item: (item[0][0], -item[0][1])):
        if start >= position:
            yield (start, length), part
            position = start + length


def _joined(terms: Sequence[tuple[int, TermKind]]) -> Terms:
    """Returns the terms with whole neighbours as one; parts that are shared stay by themselves."""
    result: list[tuple[int, TermKind]] = []
    for length, kind in terms:
        if kind == "whole" and result and result[-1][1] == "whole":
            result[-1] = (result[-1][0] + length, "whole")
        else:
            result.append((length, kind))
    return tuple(result)
