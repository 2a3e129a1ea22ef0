"""The live result of ``apply``: the user's module, in place, with what must be done around its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from lightning_pardist.mesh import Meshes
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import ParallelPlan

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


ROOT_CALL = "_pardist_root_call"
"""Name of the method on a sharded module that runs a function between the root's hooks."""


class HeldScalar:
    """A parameter without dims under fully_shard.

    ``stored`` is what optimizers and checkpoints see: a DTensor, replicated on the sharding mesh, so that one optimizer
    group holds parameters of one kind. ``local`` is what the user's code computes with, a plain tensor that shares its
    memory. They change places around every step, as fully_shard does with its sharded and unsharded parameters.
    """

    def __init__(self, owners: list[tuple[nn.Module, str]], stored: nn.Parameter, local: nn.Parameter) -> None:
        self.owners = owners
        self.stored = stored
        self.local = local

    @property
    def is_local(self) -> bool:
        """True while the user's code would see the plain tensor."""
        module, name = self.owners[0]
        return getattr(module, name) is self.local

    def show_local(self) -> None:
        """Lets the user's code see the plain tensor."""
        self.local.requires_grad_(self.stored.requires_grad)
        self._register(self.local)

    def show_stored(self) -> None:
        """Lets optimizers, checkpoints and the rest of the world see the DTensor."""
        self._register(self.stored)

    def _register(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module.register_parameter(name, parameter)


@dataclass(eq=False)
class ParallelModel:
    """A module to which a plan was applied.

    [Note: one root call] A step runs as ``root(fn)``: the root's hooks gather its parameters before and attach the
    backward hooks after, whatever method of the user runs inside. Arguments travel in the closure of ``fn``, so hooks
    neither cast nor copy the user's batch.
    """

    module: nn.Module
    """The user's module; its parameters are DTensors if sharded."""
    plan: ParallelPlan
    meshes: Meshes | None
    """None on one rank, where there is nothing to talk to."""
    scalars: list[HeldScalar] = field(default_factory=list)
    profile: ModelProfile | None = None
    """What the plan was made from."""
    reducer: DistributedDataParallel | None = None
    """Set while training under ``replicate``."""

    @property
    def kind(self) -> str:
        """``none``, ``replicate`` or ``shard``."""
        return self.plan.data_parallel.kind


_applied: WeakKeyDictionary[nn.Module, ParallelModel] = WeakKeyDictionary()


def remember(model: ParallelModel) -> None:
    """Notes that a module has been spread, so that a second Trainer finds it instead of spreading it twice."""
    _applied[model.module] = model


def recall(module: nn.Module) -> ParallelModel | None:
    """Returns what an earlier run made of this module, if any."""
    return _applied.get(module)
