"""The registry names, each a HybridStrategy with a ready choice of arguments.

This module is imported while Lightning is still being imported: it must not import Lightning, nor torch. The strategy
is imported when a name is used.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from lightning_pardist.strategies.hybrid import HybridStrategy


class Preset(NamedTuple):
    """What one registry name stands for."""

    description: str
    """One line, shown by tools that list the registry."""
    arguments: Mapping[str, int | str]
    """Keyword arguments of HybridStrategy; everything not named keeps its default."""


PRESETS: Mapping[str, Preset] = {
    "pardist_ddp": Preset(
        "Replicated parameters, gradients averaged over the ranks (data parallel)",
        {"zero_stage": 0},
    ),
    "pardist_zero1": Preset(
        "Optimizer state sharded over all ranks, gradients reduced once per optimizer step (ZeRO-1)",
        {"zero_stage": 1, "data_parallel_replicate_size": 1},
    ),
    "pardist_zero2": Preset(
        "Optimizer state and gradients sharded over all ranks, parameters kept after forward (ZeRO-2)",
        {"zero_stage": 2, "data_parallel_replicate_size": 1},
    ),
    "pardist_fsdp": Preset(
        "Parameters, gradients and optimizer state sharded over all ranks (FSDP2, ZeRO-3)",
        {"zero_stage": 3, "data_parallel_replicate_size": 1},
    ),
    "pardist_hybrid": Preset(
        "Everything sharded within a node, replicated across nodes (HSDP); on one node sharded over all ranks",
        {"zero_stage": 3},  # sizes "auto": one replica per node
    ),
    "pardist_tp": Preset(
        "Matrices shared over the ranks of a node (tensor parallel), everything sharded over the nodes",
        {"tensor_parallel_size": "auto", "data_parallel_replicate_size": 1, "zero_stage": 3},
    ),
    "pardist_pp": Preset(
        "The block stack cut into pipeline stages: one per node if there are several, else one per device",
        {"pipeline_parallel_size": "auto"},
    ),
    "pardist_3d": Preset(
        "Two stages, matrices shared over 2 ranks (the ranks of a node if there are several nodes), the rest sharded",
        {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": "auto",
            "data_parallel_replicate_size": 1,
            "zero_stage": 3,
        },
    ),
}


class _Registry(Protocol):
    """The part of Lightning's registry that is used here."""

    def __contains__(self, name: object) -> bool: ...

    def register(self, name: str, strategy: Any, description: str, **init_params: Any) -> Any: ...


_registering = threading.Lock()
"""Lightning may be imported in one thread and this package in another; each would find a name missing and add it."""


def hybrid_strategy(**arguments: Any) -> HybridStrategy:
    """Returns a HybridStrategy with these arguments; this is what the registry calls for each of our names."""
    from lightning_pardist.strategies.hybrid import HybridStrategy

    return HybridStrategy(**arguments)


def register(registry: _Registry) -> None:
    """Adds every preset to Lightning's registry; a name that is there already, from us or from others, stays."""
    with _registering:
        for name, preset in PRESETS.items():
            if name not in registry:
                registry.register(name, hybrid_strategy, description=preset.description, **preset.arguments)
