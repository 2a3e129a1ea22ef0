"""Turns the notes of a run into a ``ModelProfile``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn

from lightning_pardist.describe.record import Call, SeenTensor, Segment, StepRecorder
from lightning_pardist.describe.stacks import BlockRun, Stack, find_stacks
from lightning_pardist.specs.model_profile import (
    BETWEEN,
    PREFIX,
    SUFFIX,
    BlockProfile,
    ModelProfile,
    ParameterProfile,
    PhaseCost,
    StackProfile,
    TensorSpec,
)


def block_runs(recorder: StepRecorder) -> dict[str, BlockRun]:
    """Returns what the run saw of the first call of each candidate block."""
    first_calls: dict[str, Call] = {}
    for call in recorder.calls:
        if call.last >= 0:
            first_calls.setdefault(call.name, call)
    runs: dict[str, BlockRun] = {}
    for name, call in first_calls.items():
        depends = 0
        for seen in call.inputs:
            depends |= seen.depends
        runs[name] = BlockRun(call.first, call.last, partial(_depends_on, depends))
    return runs


def _depends_on(depends: int, earlier: BlockRun) -> bool:
    inside_earlier = ((1 << (earlier.end - earlier.start + 1)) - 1) << earlier.start
    return bool(depends & inside_earlier)


def assemble_profile(module: nn.Module, recorder: StepRecorder | None, reason: str | None) -> ModelProfile:
    """Returns the profile.

    Args:
        module: the original, for a step may leave ``requires_grad`` of the copy's parameters toggled.
        recorder: the notes, or None if there was no run.
        reason: why there was no run, or none that finished.
    """
    stacks = find_stacks(module, None if recorder is None else block_runs(recorder))
    assembler = Assembler(module, recorder, stacks)
    costs = assembler.costs()
    buffers = {id(buffer): buffer for buffer in module.buffers()}
    return ModelProfile(
        module_class=type(module).__name__,
        source="module_tree" if recorder is None else "fake_run",
        fallback_reason=reason,
        parameters=assembler.parameters(),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()),
        stacks=assembler.stacks(),
        prefix=costs.get(PREFIX, PhaseCost()),
        between=costs.get(BETWEEN, PhaseCost()),
        suffix=costs.get(SUFFIX, PhaseCost()),
        called_modules=tuple(recorder.called_modules) if recorder else None,
    )


class Assembler:
    """Phases, costs and block profiles from one run's notes and the stacks found in it."""

    def __init__(self, module: nn.Module, recorder: StepRecorder | None, stacks: Sequence[Stack]) -> None:
        """Joins what is known.

        Args:
            module: the module (the original or the copy).
            recorder: the notes, or None if there was no run.
            stacks: the stacks, in call order.
        """
        self._module = module
        self._modules = dict(module.named_modules())
        self._recorder = recorder
        self._stacks = stacks
        self._phases = [] if recorder is None else self._phase_of_segments(recorder)

    def _phase_of_segments(self, recorder: StepRecorder) -> list[str]:
        block_names = {name for stack in self._stacks for name in stack.blocks}

        def block_of(segment: Segment) -> str | None:
            position = segment.call
            while position is not None:
                call = recorder.calls[position]
                if call.name in block_names:
                    return call.name
                position = call.parent
            return None

        blocks = [block_of(segment) for segment in recorder.segments]
        inside = [index for index, block in enumerate(blocks) if block is not None]
        first, last = (inside[0], inside[-1]) if inside else (len(blocks), len(blocks))
        return [
            block or (PREFIX if index < first else SUFFIX if index > last else BETWEEN)
            for index, block in enumerate(blocks)
        ]

    def costs(self) -> dict[str, PhaseCost]:
        """Returns phase -> cost."""
        totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for phase, segment in zip(self._phases, self._recorder.segments if self._recorder else ()):
            total = totals[phase]
            total[0] += segment.flops_forward
            total[1] += segment.flops_backward
            total[2] += segment.saved_activation_bytes
        return {
            phase: PhaseCost(flops_forward=forward, flops_backward=backward, saved_activation_bytes=saved)
            for phase, (forward, backward, saved) in totals.items()
        }

    def parameters(self) -> tuple[ParameterProfile, ...]:
        """Returns the profile of every parameter, once."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        return tuple(
            ParameterProfile(
                name=name,
                aliases=tuple(names[id(parameter)][1:]),
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                phases=self._phases_using(name),
                is_reached=self._is_reached(name),
                users=tuple(self._recorder.users.get(name, ())) if self._recorder else (),
            )
            for name, parameter in self._module.named_parameters()
        )

    def _is_reached(self, name: str) -> bool:
        """Returns False only where the backward pass is known to have left a parameter out."""
        reached = self._recorder.reached if self._recorder is not None else {}
        return not reached or name in reached

    def _phases_using(self, name: str) -> tuple[str, ...]:
        if self._recorder is None:
            return ()
        return tuple(dict.fromkeys(self._phases[segment] for segment in self._recorder.uses.get(name, ())))

    def stacks(self) -> tuple[StackProfile, ...]:
        """Returns the profile of every stack."""
        costs = self.costs()
        first_names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return tuple(
            StackProfile(
                name=stack.name,
                blocks=tuple(
                    self._block(name, index, costs.get(name, PhaseCost()), first_names)
                    for index, name in enumerate(stack.blocks)
                ),
            )
            for stack in self._stacks
        )

    def _block(self, name: str, index: int, cost: PhaseCost, first_names: dict[int, str]) -> BlockProfile:
        block = self._modules[name]
        calls = [call for call in self._recorder.calls if call.name == name] if self._recorder else []
        return BlockProfile(
            name=name,
            index=index,
            class_name=type(block).__name__,
            parameter_names=tuple(first_names[id(parameter)] for parameter in block.parameters()),
            cost=cost,
            inputs=tuple(self._specs(calls[0].inputs)) if calls else (),
            outputs=tuple(self._specs(calls[0].outputs)) if calls else (),
            calls=len(calls),
        )

    def _specs(self, seen: Sequence[SeenTensor]) -> Iterator[TensorSpec]:
        for tensor in seen:
            origin = self._phases[tensor.made] if isinstance(tensor.made, int) else tensor.made
            yield TensorSpec(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                origin=origin,
                depends_on=self._phases_in(tensor.depends),
            )

    def _phases_in(self, depends: int) -> tuple[str, ...]:
        found: dict[str, None] = {}
        while depends:
            lowest = depends & -depends
            found[self._phases[lowest.bit_length() - 1]] = None
            depends ^= lowest
        return tuple(found)
