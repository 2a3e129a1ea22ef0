"""The module tree as a value: what a planner may know of a module without holding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property


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
    aliases: tuple[str, ...] = ()
    """Its other names: one object may be a child of several modules, such as an encoding that all blocks share."""

    def contains(self, other: str) -> bool:
        """True if the module named ``other`` is this one or lies inside it."""
        return not self.name or any(
            other == name or other.startswith(name + ".") for name in (self.name, *self.aliases)
        )


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
        return self._by_name[name]

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
        return self._below[name]

    def owners(self, parameter: str) -> tuple[str, ...]:
        """Names of the modules that register a parameter; more than one if it, or its module, is shared."""
        return self._owners.get(parameter, ())

    # Planners ask thousands of times about large trees, so each answer is worked out once.

    @cached_property
    def _by_name(self) -> dict[str, ModuleNode]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _below(self) -> dict[str, tuple[str, ...]]:
        below: dict[str, dict[str, None]] = {node.name: {} for node in self.nodes}
        for node in self.nodes:
            for name in (node.name, *node.aliases):
                parts = name.split(".") if name else []
                for around in (".".join(parts[:depth]) for depth in range(len(parts) + 1)):
                    if around in below:
                        below[around].update(dict.fromkeys(node.own_parameters))
        return {name: tuple(parameters) for name, parameters in below.items()}

    @cached_property
    def _owners(self) -> dict[str, tuple[str, ...]]:
        owners: dict[str, list[str]] = {}
        for node in self.nodes:
            for parameter in dict.fromkeys(node.own_parameters):
                owners.setdefault(parameter, []).extend((node.name, *node.aliases))
        return {parameter: tuple(names) for parameter, names in owners.items()}
