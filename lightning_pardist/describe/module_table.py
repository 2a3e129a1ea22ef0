"""Turns a live module tree into a ``ModuleTable``."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torchmetrics import Metric

from lightning_pardist.base.batch_norm import is_batch_norm
from lightning_pardist.specs.module_table import ModuleNode, ModuleTable


def module_table(module: nn.Module, called: Collection[str] | None = None) -> ModuleTable:
    """Returns the module tree as a value.

    Args:
        module: the root.
        called: names of modules whose forward runs in a step; None if no run could tell, then none counts as called.
    """
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    metrics = [name for name, child in module.named_modules() if isinstance(child, Metric)]
    ran = frozenset(called or ())
    nodes = []
    names: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        names.setdefault(id(child), []).append(name)
    for name, child in module.named_modules():
        own = child.named_parameters(recurse=False, remove_duplicate=False)
        nodes.append(
            ModuleNode(
                name=name,
                class_name=type(child).__name__,
                own_parameters=tuple(dict.fromkeys(first_names[id(parameter)] for _, parameter in own)),
                is_called=name in ran,
                is_metric=any(name == metric or name.startswith(metric + ".") for metric in metrics),
                is_batch_norm=is_batch_norm(child),
                aliases=tuple(names[id(child)][1:]),
            )
        )
    return ModuleTable(nodes=tuple(nodes))
