"""Feature dims of tensors as products of *shard axes* that are merged wherever the code forces them to agree.

[Note: shard axes]
Every dim of every parameter is one axis to begin with. A dim of a tensor is a list of factors, outer before inner:
axes, and plain integers for what no parameter gave. Three things happen to an axis as the forward pass goes on:
- a view *splits* it into factors (width -> heads x head_dim), everywhere at once;
- a split, chunk or slice *cuts* it into parts (a fused projection -> q, k, v);
- an operation that needs two dims to be sharded alike (elementwise, batch dims of a matmul) *unifies* them.
An operation that mixes the values along an axis (a norm, a softmax, a sum) *stops* it: it cannot be sharded. What is
left at the end are classes of axes that can be sharded together; the outermost of them in the input of a closing linear
layer is the one that is sharded. Axes are union-find nodes, so that all of this costs next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias, Union


class Axis:
    """A factor of a dim that came from a parameter."""

    __slots__ = ("closed", "cuts", "factors", "opened", "parent", "size", "stopped")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Axis | None = None
        self.factors: tuple[Axis, ...] = ()
        self.cuts: dict[tuple[int, int], Axis] = {}
        """(start, length) -> the part, for what was sliced out of it."""
        self.stopped: str | None = None
        """Why it cannot be sharded."""
        self.opened = False
        """A linear layer that is sharded by its output features made it."""
        self.closed = False
        """A linear layer contracted it, so a sum over the ranks ends it."""


Factor: TypeAlias = Union[Axis, int]  # noqa: UP007 (evaluated at run time on Python 3.10)
Factors: TypeAlias = tuple[Factor, ...]


def find(axis: Axis) -> Axis:
    """Returns the axis that stands for the whole class."""
    while axis.parent is not None:
        axis = axis.parent
    return axis


def size_of(factors: Iterable[Factor]) -> int:
    """Returns the product of the factors' sizes."""
    return prod(factor if isinstance(factor, int) else factor.size for factor in factors)


def expand(factors: Iterable[Factor]) -> list[Factor]:
    """Returns the factors down to axes that were never split, without those of size 1."""
    result: list[Factor] = []
    for factor in factors:
        if isinstance(factor, int):
            result += [factor] if factor != 1 else []
            continue
        root = find(factor)
        if root.factors:
            result += expand(root.factors)
        elif root.size != 1:
            result.append(root)
    return result


def axes(factors: Iterable[Factor]) -> list[Axis]:
    """Returns the axes among the expanded factors."""
    return [factor for factor in expand(factors) if isinstance(factor, Axis)]


def is_live(axis: Axis) -> bool:
    """Returns True for an axis that a column linear opened and nothing stopped."""
    root = find(axis)
    return root.opened and root.stopped is None


def stop(factors: Iterable[Factor], reason: str) -> None:
    """Forbids to shard these factors, and all that was cut or split from them."""
    for factor in factors:
        if isinstance(factor, Axis):
            root = find(factor)
            root.stopped = root.stopped or reason
            stop(root.factors, reason)
            stop(root.cuts.values(), reason)


def mark(factors: Iterable[Factor], *, opened: bool = False, closed: bool = False) -> None:
    """Notes that a column linear made these factors, or that a row linear ends them."""
    for factor in factors:
        if isinstance(factor, Axis):
            root = find(factor)
            root.opened |= opened
            root.closed |= closed
            mark(root.factors, opened=opened, closed=closed)
            mark(root.cuts.values(), opened=opened, closed=closed)


def _child(of: Axis, size: int) -> Axis:
    child = Axis(size)
    child.stopped, child.opened, child.closed = of.stopped, of.opened, of.closed
    return child


def split(factor: Factor, outer: int) -> tuple[Factor, Factor]:
    """Returns the factor as (outer, inner), the outer one of the given size, which divides it."""
    if isinstance(factor, int):
        return outer, factor // outer
    root = find(factor)
    assert not root.factors and root.size % outer == 0
    if root.cuts:
        stop(root.cuts.values(), "it is viewed as several dims in one place and sliced in another")
    root.factors = _child(root, outer), _child(root, root.size // outer)
    return root.factors


def _union(one: Factor, other: Factor) -> Factor:
    if isinstance(one, int):
        return other
    if isinstance(other, int):
        return one
    kept, gone = find(one), find(other)
    if kept is gone:
        return kept
    gone.parent = kept
    kept.opened |= gone.opened
    kept.closed |= gone.closed
    reason = kept.stopped or gone.stopped
    for interval, part in gone.cuts.items():
        if interval in kept.cuts:
            unify((kept.cuts[interval],), (part,))
        else:
            kept.cuts[interval] = part
    if reason is not None:
        stop((kept,), reason)
    return kept


def _pop(queue: deque[Factor]) -> Factor | None:
    """Returns the next factor as it is split by now."""
    while queue:
        parts = expand([queue.popleft()])
        if parts:
            queue.extendleft(reversed(parts[1:]))
            return parts[0]
    return None


def unify(one: Sequence[Factor], other: Sequence[Factor]) -> Factors:
    """Makes two dims of one size agree and returns their common factors; splits axes where they must be."""
    if 0 in (size_of(one), size_of(other)):  # nothing is in the tensor, so nothing meets
        return tuple(one)
    left, right = deque(one), deque(other)
    result: list[Factor] = []
    while (a := _pop(left)) is not None:
        b = _pop(right)
        assert b is not None, "the dims have different sizes"
        small, large = sorted((size_of([a]), size_of([b])))
        if large % small:
            stop([a, b, *left, *right], "two dims that must agree are made of factors that do not divide each other")
            return (size_of(one),)
        if size_of([a]) > small:
            a, rest = split(a, small)
            left.appendleft(rest)
        elif size_of([b]) > small:
            b, rest = split(b, small)
            right.appendleft(rest)
        result.append(_union(a, b))
    return tuple(result)


def regroup(dims: Sequence[Factors], shape: Sequence[int]) -> list[Factors]:
    """Returns the factors of the dims of a view: the same elements in the same order under another shape."""
    if 0 in shape:
        return [(int(size),) for size in shape]
    queue: deque[Factor] = deque(factor for dim in dims for factor in dim)
    return [_take(queue, size) for size in shape]


def _take(queue: deque[Factor], size: int) -> Factors:
    result: list[Factor] = []
    left = size
    while left > 1:
        factor = _pop(queue)
        assert factor is not None, "a view has more elements than its base"
        width = size_of([factor])
        if left % width == 0:
            result.append(factor)
            left //= width
        elif width % left == 0:
            outer, inner = split(factor, left)
            queue.appendleft(inner)
            result.append(outer)
            left = 1
        else:
            stop([factor, *queue, *result], "a view cuts across it")
            queue.clear()
            queue.append(1 << 62)  # no factor that is left can be told from another: all plain from here on
            return (size,)
    return tuple(result)


def cut(factors: Sequence[Factor], start: int, length: int) -> Factors:
    """Returns the factors of the slice ``[start, start + length)`` of a dim."""
    parts = expand(factors)
    if length == size_of(parts):
        return tuple(parts)
    if not parts or not length:
        return (length,)
    first, rest = parts[0], parts[1:]
    inner = size_of(rest)
    if start % inner == 0 and length % inner == 0:
        return (_cut_axis(first, start // inner, length // inner), *rest)
    if start // inner == (start + length - 1) // inner:
        _cut_axis(first, start // inner, 1)
        return cut(rest, start % inner, length)
    stop(parts, "a slice cuts across it")
    return (length,)


def _cut_axis(factor: Factor, start: int, length: int) -> Factor:
    if isinstance(factor, int):
        return length
    root = find(factor)
    if (start, length) not in root.cuts:
        root.cuts[start, length] = _child(root, length)
    return root.cuts[start, length]


def shard_parts(axis: Axis, chosen: Collection[Axis]) -> tuple[int, ...] | None:
    """Returns the sizes of the parts that a dim falls into, each of which is sharded over the ranks by itself.

    One part for an ordinary column linear, three for q, k and v in one weight. None if no chosen class is in the dim,
    or only in a part of it.

    Args:
        axis: the axis of a whole dim of a parameter.
        chosen: the classes that are sharded.
    """
    root = find(axis)
    if root in chosen:
        return (root.size,)
    if root.cuts and not root.factors:
        return _parts_of_cuts(root, chosen)
    for index, factor in enumerate(root.factors):
        inside = shard_parts(factor, chosen)
        if inside is not None:
            inner = size_of(root.factors[index + 1 :])
            return tuple(size * inner for size in inside) * size_of(root.factors[:index])
    return None


def _parts_of_cuts(root: Axis, chosen: Collection[Axis]) -> tuple[int, ...] | None:
    result: tuple[int, ...] = ()
    position = 0
    for (start, length), part in sorted(root.cuts.items(), key=lambda item: (item[0][0], -item[0][1])):
        if start < position and start + length <= position:
            continue  # a part of a part
        inside = shard_parts(part, chosen)
        if start != position or inside is None:
            return None
        result += inside
        position += length
    return result if position == root.size else None


def all_axes(axis: Axis) -> Iterator[Axis]:
    """Yields every class that an axis is split or cut into, itself included."""
    root = find(axis)
    yield root
    for part in (*root.factors, *root.cuts.values()):
        yield from all_axes(part)
