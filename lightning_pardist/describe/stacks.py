"""Which modules are blocks: children of a container that are alike and called one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NOT_LAYERS = ("torch.nn.modules.module", "torch.nn.modules.container", "torch.nn.modules.transformer")
_MOST_UNEVEN = 2.0
_LEAST_COVERED = 0.8
_INTERLEAVED_SHARE = 0.1


@dataclass(frozen=True)
class Stack:
    """A container and the names of those of its children that are blocks, in order."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class BlockRun:
    """What the run saw of one candidate block's first call."""

    start: int
    end: int
    follows: Callable[[BlockRun], bool]
    """True if a parameter used in the other call went into what this call was given."""


def candidate_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Returns every module, by name, that could be a block of some stack."""
    names = {id(module): name for name, module in root.named_modules()}
    return {
        name: block
        for container_name, container in root.named_modules()
        if isinstance(container, _CONTAINERS)
        for name, block in _block_children(container_name, container)
        if names[id(block)] == name
    }


def find_stacks(root: nn.Module, runs: Mapping[str, BlockRun] | None) -> list[Stack]:
    """Returns the outermost stacks of like blocks.

    Args:
        root: the module.
        runs: what the run saw of each candidate block that was called; None if there was no run. Then every container
            of like modules counts, in the order of registration, and nothing tells blocks from parallel branches.

    A stack of uneven blocks gives way to the stacks inside them (the stages of a hierarchical vision transformer).
    """
    finder = _Finder(root, runs)
    stacks = finder.inside(root, "")
    if runs is None:
        return stacks
    stacks.sort(key=lambda stack: min(runs[name].start for name in stack.blocks if name in runs))
    return [stack for stack in stacks if not finder.is_lesser_partner(stack, stacks)]


def _block_children(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in container.named_children():
        if _is_block_like(child):
            yield f"{name}.{key}" if name else key, child


def _is_block_like(module: nn.Module) -> bool:
    """True for a module with parameters that is more than one layer of torch.nn (or a subclass of one)."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or next(module.parameters(), None) is None:
        return False
    return not any(
        base.__module__.startswith("torch.nn.modules.") and base.__module__ not in _NOT_LAYERS
        for base in type(module).__mro__
    )


def _kind(module: nn.Module) -> object:
    """Returns equal values for like modules: the class, and for an anonymous Sequential what it is made of."""
    if type(module) is nn.Sequential:
        return nn.Sequential, tuple(type(child) for child in module)
    return type(module)


class _Finder:
    def __init__(self, root: nn.Module, runs: Mapping[str, BlockRun] | None) -> None:
        self._modules = dict(root.named_modules())
        self._runs = runs
        self._sizes: dict[str, int] = {}

    def inside(self, module: nn.Module, name: str) -> list[Stack]:
        """Returns the outermost stacks in ``module``."""
        stack = self._stack_of(module, name)
        blocks = frozenset(stack.blocks if stack else ())
        found = [] if stack is None else self._stack_or_its_parts(stack)
        for key, child in module.named_children():
            child_name = f"{name}.{key}" if name else key
            if child_name not in blocks:
                found += self.inside(child, child_name)
        return found

    def _stack_or_its_parts(self, stack: Stack) -> list[Stack]:
        sizes = [self._size(name) for name in stack.blocks]
        if self._runs is not None and max(sizes) > _MOST_UNEVEN * min(sizes):
            parts = [part for name in stack.blocks for part in self.inside(self._modules[name], name)]
            covered = sum(self._size(name) for part in parts for name in part.blocks)
            if covered >= _LEAST_COVERED * sum(sizes):
                return parts
        return [stack]

    def _stack_of(self, container: nn.Module, name: str) -> Stack | None:
        if not isinstance(container, _CONTAINERS):
            return None
        children = list(_block_children(name, container))
        counts = Counter(_kind(child) for _, child in children)
        repeated = [index for index, (_, child) in enumerate(children) if counts[_kind(child)] > 1]
        if len(repeated) < 2:
            return None
        if not isinstance(container, nn.ModuleList):
            # From the first repeated class to the last: a Sequential may hold embedding, blocks and head in one row.
            children = children[repeated[0] : repeated[-1] + 1]
        span = [child_name for child_name, _ in children]
        if self._runs is None:
            return Stack(name, tuple(span))
        return Stack(name, self._in_call_order(span)) if self._are_called_in_turn(span) else None

    def _are_called_in_turn(self, names: Sequence[str]) -> bool:
        assert self._runs is not None
        called = sorted((self._runs[name] for name in names if name in self._runs), key=lambda run: run.start)
        if len(called) < 2 or 2 * len(called) < len(names):
            return False
        return all(later.start > earlier.end and later.follows(earlier) for earlier, later in pairwise(called))

    def _in_call_order(self, names: Sequence[str]) -> tuple[str, ...]:
        assert self._runs is not None
        if all(name in self._runs for name in names):
            runs = self._runs
            return tuple(sorted(names, key=lambda name: runs[name].start))
        return tuple(names)  # a block that the step left out has its place by registration only

    def is_lesser_partner(self, stack: Stack, others: Sequence[Stack]) -> bool:
        """True if the stack's calls alternate with those of one ten times its size (norms in a list of their own)."""
        assert self._runs is not None
        start, end = self._interval(stack)
        for other in others:
            other_start, other_end = self._interval(other)
            alternate = other is not stack and start <= other_end and other_start <= end
            if alternate and self._weight(stack) < _INTERLEAVED_SHARE * self._weight(other):
                return True
        return False

    def _interval(self, stack: Stack) -> tuple[int, int]:
        assert self._runs is not None
        runs = [self._runs[name] for name in stack.blocks if name in self._runs]
        return min(run.start for run in runs), max(run.end for run in runs)

    def _weight(self, stack: Stack) -> int:
        return sum(self._size(name) for name in stack.blocks)

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            self._sizes[name] = sum(parameter.numel() for parameter in self._modules[name].parameters())
        return self._sizes[name]
