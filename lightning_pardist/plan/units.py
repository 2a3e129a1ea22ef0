"""Which parameters are gathered and reduced together: the sharding units of one module.

Rules, in order of weight:

1. Every parameter belongs to exactly one unit; the root takes what no other unit holds, so none is left unsynchronised.
2. Hooks gather a unit's parameters when its modules run, so a module is a unit only if its forward runs in the step and
   nobody outside it touches its parameters.
3. A shared parameter and all modules that own it lie in one unit (torch refuses anything else).
4. Blocks of the stacks are units; a module without a stack is cut by size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lightning_pardist.base.errors import message
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.module_table import ModuleNode, ModuleTable
from lightning_pardist.specs.parallel_plan import ShardUnit

SIZE_UNIT_SHARE = 8
"""Without a stack, a subtree becomes a unit once it holds no more than 1/8 of all parameters: about eight units."""
SMALLEST_UNIT_SHARE = 64
"""A subtree with less than 1/64 of all parameters is not worth a collective of its own and stays with the root."""


@dataclass(frozen=True, kw_only=True)
class UnitRequest:
    """What decides the units besides the module itself."""

    patterns: tuple[str, ...]
    """Class names or module name patterns of the user; empty: derive."""
    reshard_after_forward: bool
    lower_precision: bool
    """True if parameters are gathered in a lower dtype than they are stored in."""


def shard_units(table: ModuleTable, profile: ModelProfile, request: UnitRequest) -> tuple[ShardUnit, ...]:
    """Returns the units in the order in which they must be applied, the root last.

    Raises:
        ValueError: if one of the user's patterns matches nothing, or a module that cannot be a unit.
    """
    if request.patterns:
        tops = _matched(table, request.patterns)
    else:
        tops = _derived(table, profile)
    groups = _share_ties(table, [(node.name,) for node in tops])
    groups += _batch_norm_group(table, groups) if request.lower_precision else []
    left_out = {*ignored_parameters(table), *scalar_parameters(profile)}
    units = _inner_before_outer(table, groups, left_out, request)
    taken = {name for unit in units for name in unit.parameters} | left_out
    root = ShardUnit(
        modules=("",),
        parameters=tuple(name for name in table.parameters_below("") if name not in taken),
        # The root's parameters are used first in forward and again at the start of backward: freeing gains nothing.
        reshard_after_forward=False,
    )
    return (*units, root)


def ignored_parameters(table: ModuleTable) -> tuple[str, ...]:
    """Returns the parameters that live inside metrics: they are measuring devices, not part of the model."""
    names = (name for node in table if node.is_metric for name in node.own_parameters)
    return tuple(dict.fromkeys(names))


def scalar_parameters(profile: ModelProfile) -> tuple[str, ...]:
    """Returns the parameters without a dim to shard, such as CLIP's ``logit_scale``."""
    return tuple(p.name for p in profile.parameters if not p.shape)


def _matched(table: ModuleTable, patterns: Sequence[str]) -> list[ModuleNode]:
    found: dict[str, ModuleNode] = {}
    for pattern in patterns:
        hits = [n for n in table if n.name and (n.class_name == pattern or fnmatchcase(n.name, pattern))]
        hits = [n for n in hits if table.parameters_below(n.name) and not n.is_metric]
        if not hits:
            classes = sorted({n.class_name for n in table if n.name and table.parameters_below(n.name)})
            raise ValueError(
                message(
                    "Every entry of fsdp_units must match a module with parameters, by class name or by name pattern.",
                    got=f"{pattern!r} matches nothing",
                    source="the strategy's argument fsdp_units",
                    change=f"use one of the classes {', '.join(classes)}, or a pattern such as 'model.layers.*'",
                )
            )
        found.update((n.name, n) for n in hits)
    return [n for n in table if n.name in found]


def _derived(table: ModuleTable, profile: ModelProfile) -> list[ModuleNode]:
    blocks = [table.node(block.name) for block in profile.blocks()]
    blocks = [n for n in blocks if table.parameters_below(n.name) and not n.is_metric]
    if blocks:
        return [n for n in blocks if not _touched_from_outside(table, profile, n) and not _tied_outside(table, n)]
    sizes = {p.name: p.numel for p in profile.parameters}
    total = sum(sizes.values())
    chosen: list[ModuleNode] = []

    def visit(node: ModuleNode) -> None:
        size = sum(sizes[name] for name in table.parameters_below(node.name))
        if size * SMALLEST_UNIT_SHARE < total:
            return
        children = list(table.children(node.name))
        fits = size * SIZE_UNIT_SHARE <= total or not any(table.parameters_below(c.name) for c in children)
        usable = node.is_called and not node.is_metric and not _touched_from_outside(table, profile, node)
        if node.name and fits and usable and not _tied_outside(table, node):
            chosen.append(node)
            return
        for child in children:
            visit(child)

    visit(table.node(""))
    return chosen


def _touched_from_outside(table: ModuleTable, profile: ModelProfile, node: ModuleNode) -> bool:
    """True if code outside the module uses one of its parameters (a weight penalty in training_step, say)."""
    below = set(table.parameters_below(node.name))
    return any(not node.contains(user) for p in profile.parameters if p.name in below for user in p.users)


def _tied_outside(table: ModuleTable, node: ModuleNode) -> bool:
    below = table.parameters_below(node.name)
    return any(not node.contains(owner) for name in below for owner in table.owners(name))


def _share_ties(table: ModuleTable, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins groups that share a parameter and draws in modules outside all groups that own it too."""
    merged: list[set[str]] = []
    for group in groups:
        members = set(group)
        for name in {p for module in group for p in table.parameters_below(module)}:
            inside = [table.node(member) for member in members]
            members |= {owner for owner in table.owners(name) if not any(n.contains(owner) for n in inside)}
        for other in [m for m in merged if _overlap(table, m, members)]:
            merged.remove(other)
            members |= other
        merged.append(members)
    order = {node.name: position for position, node in enumerate(table)}
    return [tuple(sorted(_outermost(table, m), key=order.__getitem__)) for m in merged]


def _overlap(table: ModuleTable, left: set[str], right: set[str]) -> bool:
    if len(left) == 1 and len(right) == 1:
        # Nested single modules (a block and its attention) are two units; only shared parameters join them.
        (a,), (b,) = left, right
        if table.node(a).contains(b) or table.node(b).contains(a):
            return False
    return bool(_parameters(table, left) & _parameters(table, right))


def _parameters(table: ModuleTable, modules: Iterable[str]) -> set[str]:
    return {name for module in modules for name in table.parameters_below(module)}


def _outermost(table: ModuleTable, modules: set[str]) -> set[str]:
    return {m for m in modules if not any(o != m and table.node(o).contains(m) for o in modules)}


def _batch_norm_group(table: ModuleTable, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    taken = {module for group in groups for module in group}
    names = tuple(
        n.name for n in table if n.is_batch_norm and n.own_parameters and not n.is_metric and n.name not in taken
    )
    return [names] if names else []


def _inner_before_outer(
    table: ModuleTable, groups: list[tuple[str, ...]], left_out: set[str], request: UnitRequest
) -> tuple[ShardUnit, ...]:
    depth_first = sorted(groups, key=lambda group: -max(name.count(".") for name in group))
    units: list[ShardUnit] = []
    taken = set(left_out)
    for group in depth_first:
        names = tuple(n for n in dict.fromkeys(_ordered(table, group)) if n not in taken)
        if not names:
            continue
        taken.update(names)
        full = request.lower_precision and all(table.node(m).is_batch_norm for m in group)
        units.append(
            ShardUnit(
                modules=group,
                parameters=names,
                reshard_after_forward=request.reshard_after_forward,
                full_precision=full,
            )
        )
    return tuple(units)


def _ordered(table: ModuleTable, group: tuple[str, ...]) -> list[str]:
    return [name for module in group for name in table.parameters_below(module)]
