"""The module tree as a value: what a planner may know of a module without holding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModuleNode:
    """One module of the tree, once, under its first name."""

    name: str
    """Dotted name from the root; the root is ``""``."""
    class_name: str
    own_parameters: tuple[str, ...]
    """First names of the parameters registered on this very module."""
    is_called: bool
    """Its forward runs in the step, so hooks on it run too. Containers such as ModuleList are never called."""
    is_metric: bool
    """It is, or lies inside, a torchmetrics metric: never sharded, never cast."""
    is_batch_norm: bool

    def contains(self, other: str) -> bool:
        """True if the module named ``other`` is this one or lies inside it."""
        return not self.name or other == self.name or other.startswith(self.name + ".")


@dataclass(frozen=True, kw_only=True)
class ModuleTable:
    """All modules of a tree in ``named_modules`` order."""

    nodes: tuple[ModuleNode, ...]

    def __iter__(self) -> Iterator[ModuleNode]:
        return iter(self.nodes)

    def node(self, name: str) -> ModuleNode:
        """Returns the module of that name.

        Raises:
            KeyError: if there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def children(self, name: str) -> Iterable[ModuleNode]:
        """Direct children of a module."""
        prefix = f"{name}." if name else ""
        return (
            node
            for node in self.nodes
            if node.name and node.name.startswith(prefix) and "." not in node.name[len(prefix) :]
        )

    def parameters_below(self, name: str) -> tuple[str, ...]:
        """First names of all parameters registered in the subtree, in order, each once."""
        top = self.node(name)
        names = (parameter for node in self.nodes if top.contains(node.name) for parameter in node.own_parameters)
        return tuple(dict.fromkeys(names))

    def owners(self, parameter: str) -> tuple[str, ...]:
        """Names of the modules that register a parameter; more than one if it is tied."""
        return tuple(node.name for node in self.nodes if parameter in node.own_parameters)
