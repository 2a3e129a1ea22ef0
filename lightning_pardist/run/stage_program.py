"""One stage: the user's own step, run on one micro-batch until this stage's last block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.nested import map_leaves, tensors_of
from lightning_pardist.parallel_model import PipelineCut
from lightning_pardist.specs.pipeline_plan import Leaf, Outputs, StagePlan, Value
from lightning_pardist.torch_pipelining_api import Apart, TensorShape, to_be_sent


class StageDone(BaseException):
    """Ends the user's step at the end of a stage. A BaseException, for user code catches exceptions."""


@dataclass
class Failure:
    """What went wrong in the user's code on one stage."""

    stage: int
    micro: int
    phase: str
    error: BaseException

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts causes before their consequences: later stages saw zeros of this one."""
        return (self.phase == "backward", self.micro, self.stage)


@dataclass
class MicroBatch:
    """One micro-batch of the step that runs."""

    run: Callable[[], Any]
    """The user's step on it."""
    weight: float
    """Of its loss in the gradients."""
    outputs: Mapping[int, Outputs]
    """By block."""
    seed: int | None
    """Of the random numbers outside of blocks; None if the step draws none, or does not train."""


@dataclass
class StepRun:
    """What all stages of a rank share while one step runs."""

    micros: Sequence[MicroBatch]
    receives: Mapping[int, tuple[Value, ...]]
    """By stage."""
    sends: Mapping[int, tuple[Value, ...]]
    training: bool
    around: Callable[[int, bool], AbstractContextManager[object]]
    """Context of the user's step, given the micro-batch and whether this stage is the last."""
    root_call: Callable[[Callable[[], Any]], Any]
    """Runs a function between the hooks of the sharded root."""
    device: torch.device
    rewritten: frozenset[Value] = frozenset()
    """Outputs of blocks that code outside writes to; it must find memory, and what is sent stays as it was."""
    results: dict[int, Any] = field(default_factory=dict)
    """What the step returned, by micro-batch, on the last stage."""
    failures: list[Failure] = field(default_factory=list)

    def fail(self, stage: int, micro: int, phase: str, error: BaseException) -> None:
        """Notes an error; the schedule goes on with zeros, so that no rank waits for this one."""
        self.failures.append(Failure(stage, micro, phase, error))


class StageProgram(nn.Module):
    """What ``PipelineStage`` runs: tensors of the stage before in, tensors for the stage after (or the loss) out."""

    def __init__(self, cut: PipelineCut, stage: StagePlan, module: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self._module: nn.Module
        self._cut: PipelineCut
        self.run: StepRun | None = None
        self.is_running = False
        """The user's step runs forward on this stage."""
        # Not a submodule: parameters() must be those of this stage alone.
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_cut", cut)
        self.is_last = stage.index == len(cut.plan.stages) - 1

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the stage's parameters as its code sees them at this moment: whole ones while they are gathered."""
        for name in self.stage.parameters:
            parameter = self._module.get_parameter(name)
            if parameter.requires_grad:
                yield parameter

    def forward(self, *received: Tensor, micro: int) -> Any:
        run = self.run
        assert run is not None
        if run.failures:
            return self._nothing(run, micro)
        try:
            return self._forward(run, received, micro)
        except Exception as error:
            run.fail(self.stage.index, micro, "forward", error)
            return self._nothing(run, micro)

    def _forward(self, run: StepRun, received: tuple[Tensor, ...], micro: int) -> Any:
        batch = run.micros[micro]
        values = dict(zip(run.receives[self.stage.index], (Apart.apply(t) for t in received), strict=True))
        listener = _Listener(self.stage, batch, values, run, is_last=self.is_last)
        self._cut.listener = listener
        self.is_running = True
        try:
            with run.around(micro, self.is_last):
                if batch.seed is not None:
                    torch.manual_seed(batch.seed)
                result = run.root_call(lambda: self._until_cut(batch, listener))
        finally:
            self._cut.listener = None
            self.is_running = False
        if not self.is_last:
            return tuple(to_be_sent(tensor) for tensor in result)
        output, loss = result
        run.results[micro] = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        if loss is None or not run.training:
            return torch.zeros((), device=run.device)
        return loss * batch.weight

    def _until_cut(self, batch: MicroBatch, listener: _Listener) -> Any:
        try:
            output = batch.run()
        except StageDone:
            return listener.sent()
        if not self.is_last:
            raise RuntimeError(
                f"the step went past {self.stage.blocks[-1]}, where stage {self.stage.index} ends: it did not call "
                "that block, or it caught the exception that ends a stage (a bare `except:` does)"
            )
        return output, _loss_of(output)

    def _nothing(self, run: StepRun, micro: int) -> Any:
        if self.is_last:
            return torch.zeros((), device=run.device, requires_grad=run.training) * 1
        specs = [_spec(run.micros[micro], value) for value in run.sends[self.stage.index]]
        return tuple(_zeros(spec, run) for spec in specs)


class _Listener:
    """Decides for one micro-batch what blocks do: run, give back what was received, or give back nothing."""

    def __init__(
        self, stage: StagePlan, micro: MicroBatch, values: dict[Value, Tensor], run: StepRun, *, is_last: bool
    ) -> None:
        self._stage = stage
        self._micro = micro
        self._values = values
        self._run = run
        self._is_last = is_last
        self._wanted = {} if is_last else dict.fromkeys(run.sends[stage.index])
        self._called: set[int] = set()

    def replaces(self, block: int) -> bool:
        return not self._stage.first <= block < self._stage.stop

    def stand_in(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_call(block)
        given: list[Tensor] = []
        found: dict[int, Any] = {}

        def tensor_for(item: Any) -> Any:
            nonlocal given
            if not isinstance(item, Leaf):
                return item
            value = self._values.get((block, item.index))
            if value is None and item.passes is not None:
                given = given or tensors_of((args, kwargs))
                value = given[item.passes]
            if value is None and item.same is not None:
                value = found[item.same]
            value = _placeholder(item, self._run.device) if value is None else value
            found[item.index] = value.clone() if (block, item.index) in self._run.rewritten else value
            return found[item.index]

        return map_leaves(tensor_for, self._micro.outputs[block].structure)

    def _note_call(self, block: int) -> None:
        """Refuses what the plan has not seen and would get numbers of another call for.

        Steps whose code looks at values cannot be described to their end, so only this tells.
        """
        if block in self._called:
            raise ValueError(
                message(
                    "A stage runs its blocks once per micro-batch.",
                    got=f"{self._block(block)} was called twice in this step",
                    source="the step, after code that looks at values, which cannot be described beforehand",
                    change="call the model once per step, or use a layout without stages, as generate() needs",
                )
            )
        if block >= self._stage.stop:
            raise ValueError(
                message(
                    "Stages run their blocks in the order of training_step.",
                    got=f"{self._block(block)}, of a later stage, was called before {self._stage.blocks[-1]}",
                    source="the step, after code that looks at values, which cannot be described beforehand",
                    change="call the blocks in the order in which training_step does",
                )
            )
        self._called.add(block)

    def left(self, block: int, output: Any) -> None:
        self._note_call(block)
        tensors = tensors_of(output)
        for index, tensor in enumerate(tensors):
            if (block, index) in self._wanted:
                is_kept = (block, index) in self._run.rewritten and block != self._stage.stop - 1
                self._values[block, index] = tensor.clone() if is_kept else tensor
        if block == self._stage.stop - 1 and not self._is_last:
            raise StageDone

    def sent(self) -> tuple[Tensor, ...]:
        """Returns what goes to the next stage.

        Raises:
            ValueError: if a tensor is not what was foretold: the next stage could not receive it.
        """
        found = []
        for value in self._wanted:
            tensor, spec = self._values.get(value), _spec(self._micro, value)
            if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                got = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(
                    f"output {value[1]} of {self._block(value[0])} is {got}, not the foretold {spec.dtype} "
                    f"{spec.shape}: the shape of what crosses a cut must depend on the batch's shapes only"
                )
            if self._run.training and spec.requires_grad and not tensor.requires_grad:
                raise ValueError(
                    f"output {value[1]} of {self._block(value[0])} needs a gradient and has none to give: a block at "
                    "the end of a stage must not run under no_grad in some steps only"
                )
            found.append(tensor)
        return tuple(found)

    def _block(self, index: int) -> str:
        own = index - self._stage.first
        return self._stage.blocks[own] if 0 <= own < len(self._stage.blocks) else f"block {index}"


def _spec(micro: MicroBatch, value: Value) -> Leaf:
    block, index = value
    return micro.outputs[block].leaves[index]


def value_shapes(micro: MicroBatch, values: Sequence[Value]) -> tuple[TensorShape, ...]:
    """Returns what is foretold of values in a micro-batch."""
    specs = (_spec(micro, value) for value in values)
    return tuple(TensorShape(spec.shape, spec.dtype, spec.requires_grad) for spec in specs)


def _placeholder(spec: Leaf, device: torch.device) -> Tensor:
    value = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    return torch.full((), value, dtype=spec.dtype, device=device).expand(spec.shape)


def _zeros(spec: Leaf, run: StepRun) -> Tensor:
    zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=run.device)
    return zeros.requires_grad_() * 1 if spec.requires_grad and run.training else zeros


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None
