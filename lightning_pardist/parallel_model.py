"""The live result of ``apply``: the user's module, in place, with what must be done around its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pardist.mesh import Meshes
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.specs.pipeline_plan import PipelinePlan
from lightning_pardist.torch_dtensor_api import as_dtensor, local_tensor

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


_T = TypeVar("_T")

ROOT_CALL = "_pardist_root_call"
"""Name of the method on a sharded module that runs a function between the root's hooks."""


class HeldParameter:
    """A parameter that is a DTensor for the world and a plain tensor for the user's code.

    ``stored`` is what optimizers and checkpoints see; ``local`` is what the code computes with and shares its memory.
    They change places around every step, as fully_shard does with its sharded and unsharded parameters.
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


class HeldScalar(HeldParameter):
    """A parameter without dims under fully_shard, which cannot shard it: replicated on the sharding mesh.

    One optimizer group then holds parameters of one kind. Gradients are averaged by us.
    """


class HeldShard(HeldParameter):
    """A parameter on the tensor axis that fully_shard does not hold: this rank's share of it, or all of it."""

    def take_gradient(self) -> None:
        """Lets the plain tensor's gradient follow what was done to the DTensor's, which is the same memory or None."""
        self.local.grad = None if self.stored.grad is None else local_tensor(self.stored.grad)

    def publish_gradient(self) -> None:
        """Shows the gradient of the plain tensor as the DTensor's."""
        gradient = self.local.grad
        if gradient is None:
            self.stored.grad = None
        elif self.stored.grad is None or local_tensor(self.stored.grad) is not gradient:
            assert isinstance(self.stored, DTensor)
            self.stored.grad = as_dtensor(gradient, self.stored)


class OnShares(Protocol):
    """Who lets the module's code run on this rank's shares of its matrices."""

    def run(self, fn: Callable[[], _T]) -> _T:
        """Returns ``fn()``, run on shares."""
        ...

    def again(self, block: str) -> Callable[[], AbstractContextManager[object]]:
        """Returns what makes a context in which a block computes once more what it computes now."""
        ...


class BlockListener(Protocol):
    """Who decides what blocks do while a stage of a pipeline runs the user's step."""

    def replaces(self, block: int) -> bool:
        """Returns True if another stage runs the block."""
        ...

    def stand_in(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the block would give back, as far as it is known here."""
        ...

    def left(self, block: int, output: Any) -> None:
        """Sees what a block of this stage gives back; ends the step after the last one."""
        ...


@dataclass(eq=False)
class PipelineCut:
    """What one rank of a pipeline holds of a module that was cut into stages."""

    plan: PipelinePlan
    rank: int
    """Along the pipeline axis."""
    absent: frozenset[str]
    """First names of the parameters that this rank does not hold: in the module they are NaN and take no memory."""
    uncounted: frozenset[str]
    """First names of the parameters that it holds and another rank counts."""
    foreign_buffers: frozenset[str]
    """Names of the buffers that another rank keeps up to date."""
    seed: int = 0
    """Of all random numbers in steps; equal on all ranks."""
    listener: BlockListener | None = None
    """Set while a stage runs."""

    def runs(self, block: int) -> bool:
        """Returns whether the stage that runs now runs a block, and does not stand in for it."""
        return self.listener is not None and not self.listener.replaces(block)


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
    shards: list[HeldShard] = field(default_factory=list)
    profile: ModelProfile | None = None
    """What the plan was made from."""
    reducer: DistributedDataParallel | None = None
    """Set while training under ``replicate``."""
    tensor_mode: OnShares | None = None
    """What runs steps on shares of matrices, with its hooks; None before the first."""
    pipeline: PipelineCut | None = None
    """Set if the module was cut into stages."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Lets code see plain tensors where the world sees DTensors that fully_shard does not hold."""
        hidden = [held for held in (*self.scalars, *self.shards) if not held.is_local]
        for held in hidden:
            held.show_local()
        try:
            yield
        finally:
            for held in hidden:
                held.show_stored()

    @property
    def absent(self) -> frozenset[str]:
        """First names of the parameters that this rank does not hold."""
        return frozenset() if self.pipeline is None else self.pipeline.absent

    @property
    def tied_across_stages(self) -> frozenset[str]:
        """First names of the parameters that this rank holds and must not count, for another stage counts them."""
        return frozenset() if self.pipeline is None else self.pipeline.uncounted

    @property
    def kind(self) -> str:
        """``none``, ``replicate`` or ``shard``."""
        return self.plan.data_parallel.kind


_NOTE = "_pardist_applied"


class _Note:
    """Hangs on a module that was spread and goes with it; a copy of the module has not been spread."""

    def __init__(self, model: ParallelModel | None = None) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> _Note:
        return _Note()

    def __reduce__(self) -> tuple[type[_Note], tuple[()]]:
        return _Note, ()


def remember(model: ParallelModel) -> None:
    """Notes that a module has been spread, so that a second Trainer finds it instead of spreading it twice.

    The note is on the module itself: it names the module, so a table of all modules, weak or not, would keep every one
    of them and its process groups until the program ends.
    """
    setattr(model.module, _NOTE, _Note(model))


def recall(module: nn.Module) -> ParallelModel | None:
    """Returns what an earlier run made of this module, if any."""
    note = vars(module).get(_NOTE)
    return note.model if isinstance(note, _Note) else None
