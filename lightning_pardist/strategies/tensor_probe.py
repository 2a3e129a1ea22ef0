"""Proves a tensor-parallel plan before training: one region of each kind, sharded against whole, by numbers.

The smallest module around a region is copied with random weights and called as the observed step called it, forward and
backward, once whole and once on the ranks' shares. Outputs, and the gradients of inputs and parameters, must agree.
With sequence parallel one block of each kind of a stack is tried in the same way. Costs the memory of the module,
twice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_pardist.base.batch_norm import is_batch_norm
from lightning_pardist.base.errors import message
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.specs.tensor_plan import SequenceStack, TensorPlan
from lightning_pardist.specs.tensor_roles import RegionProbe, StackProbe
from lightning_pardist.strategies.probe_runs import Verdict, try_on_shares

LARGEST_BYTES = 2 << 30
"""Modules with more parameters than this are not tried alone (a region that spans many blocks)."""
_LARGE_BYTES = 64 << 20
"""A collection of garbage takes some tenths of a second; what smaller modules leave behind may wait."""


def prove_plan(
    module: nn.Module, plan: TensorPlan, probes: Sequence[RegionProbe], meshes: Meshes, device: torch.device
) -> TensorPlan:
    """Returns the plan with notes on what was proved; every rank must call it.

    Raises:
        ValueError: on all ranks, naming the module, if a region computes something else on shares.
    """
    kept = {index for index, share in enumerate(plan.shares) if share is not None}
    trial = _Trial(module, meshes, device)
    for probe in probes:
        if kept.intersection(probe.regions):
            problem = trial.problem(probe, _part_of(plan, probe))
            if problem:
                raise ValueError(
                    message(
                        "A region must compute the same on shares as on the whole.",
                        got=f"{probe.module}: {problem}",
                        source="the plan derived from the flow of data, tried on the module with random weights",
                        change=f"keep it whole with TensorOptions(plan={{'{probe.module}.<layer>': 'replicate'}}), "
                        "write sizes that follow the tensors (-1, head_dim) instead of numbers of heads, or "
                        "TensorOptions(verify='off')",
                    )
                )
    return replace(plan, notes=(*plan.notes, *trial.notes("kind(s) of region")))


def prove_sequence(
    module: nn.Module, plan: TensorPlan, probes: Sequence[StackProbe], meshes: Meshes, device: torch.device
) -> TensorPlan:
    """Returns the plan with notes on its stacks, tried on shares of the sequence; every rank must call it.

    Raises:
        ValueError: on all ranks, naming the module, if something between the regions looks at more than a position.
    """
    trial = _Trial(module, meshes, device)
    known = {probe.blocks: probe for probe in probes}
    for stack in plan.sequence_stacks:
        found = known.get(stack.blocks)
        if found is None:
            trial.missed.append(f"the blocks around {stack.blocks[0]} were not seen alone, so they were not tried")
            continue
        if found.between:
            raise _refusal(found.between)
        for name, child in _between_regions(module, stack):
            if is_batch_norm(child):
                raise _refusal(f"{name} ({type(child).__name__}) takes statistics over positions")
        for probe in found.probes:
            problem = trial.problem(probe, _part_of(plan, probe, stack))
            if problem:
                raise _refusal(f"{probe.module}: {problem}")
        if not found.probes:
            trial.missed.append(f"the blocks around {stack.blocks[0]} have no module in common to try them in")
    return replace(plan, notes=(*plan.notes, *trial.notes("kind(s) of block on shares of the sequence")))


def _refusal(problem: str) -> ValueError:
    return ValueError(
        message(
            "For sequence parallel, what lies between the regions of a stack must treat every position alone.",
            got=problem,
            source="the observed step, and one block of each kind tried with random weights on parts of the sequence",
            change="use TensorOptions(sequence_parallel=False): the same bytes travel, and activations between the "
            "regions are whole on every rank",
        )
    )


class _Trial:
    """Tries modules one after another and remembers how that went."""

    def __init__(self, module: nn.Module, meshes: Meshes, device: torch.device) -> None:
        self._module = module
        self._meshes = meshes
        self._device = device
        self._largest = 0.0
        self._proved = 0
        self.missed: list[str] = []

    def problem(self, probe: RegionProbe, plan: TensorPlan) -> str:
        """Returns what went wrong on any rank; empty if nothing, or if the module could not be tried."""
        top = self._module.get_submodule(probe.module)
        size = sum(p.numel() * p.element_size() for p in top.parameters())
        if size > LARGEST_BYTES:
            self.missed.append(f"{probe.module} was not tried alone: it is larger than {LARGEST_BYTES >> 30} GiB")
            return ""
        everybody: list[Verdict] = gather_objects(
            try_on_shares(top, plan, probe, self._meshes, self._device), self._meshes
        )
        if size > _LARGE_BYTES:
            gc.collect()  # graphs and hooks refer to each other: what was tried must not stay beside the next
        if reasons := [verdict.skipped for verdict in everybody if verdict.skipped]:
            self.missed.append(f"{probe.module} could not be tried alone: {reasons[0]}")
            return ""
        wrong = [f"{verdict.problem} (rank {rank})" for rank, verdict in enumerate(everybody) if verdict.problem]
        if wrong:
            return "; ".join([wrong[0], *[verdict.culprit for verdict in everybody if verdict.culprit][:1]])
        self._largest = max(self._largest, *(verdict.difference for verdict in everybody))
        self._proved += 1
        return ""

    def notes(self, what: str) -> list[str]:
        """Returns what the plan should say about it."""
        tried = f"{self._proved} {what} tried against the whole module: differences up to {self._largest:.1e}"
        return [*self.missed, tried]


def _between_regions(module: nn.Module, stack: SequenceStack) -> Iterator[tuple[str, nn.Module]]:
    for block in stack.blocks:
        for name, child in module.get_submodule(block).named_modules(prefix=block):
            if not any(name == around or name.startswith(around + ".") for around in stack.around_regions):
                yield name, child


def _part_of(plan: TensorPlan, probe: RegionProbe, stack: SequenceStack | None = None) -> TensorPlan:
    """Returns the plan of what lies inside one module, with names from there."""
    prefix, tried = probe.module, frozenset(probe.parameters)

    def inner(name: str) -> str | None:
        if name == prefix:
            return ""
        return name[len(prefix) + 1 :] if name.startswith(prefix + ".") else None

    def renamed(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            found = inner(name)
            if found is not None:
                yield found

    stacks: tuple[SequenceStack, ...] = ()
    if stack is not None:
        blocks, around = tuple(renamed(stack.blocks)), tuple(renamed(stack.around_regions))
        stacks = (replace(stack, blocks=blocks, around_regions=around),)
    return replace(
        plan,
        sequence_stacks=stacks,
        layouts=tuple(
            replace(layout, parameter=name)
            for layout in plan.layouts
            if layout.parameter in tried and (name := inner(layout.parameter)) is not None
        ),
        uses=tuple((name, role) for full, role in plan.uses if full in tried and (name := inner(full)) is not None),
        calls=tuple(
            replace(call, module=name)
            for call in plan.calls
            if call.regions <= set(probe.regions) and (name := inner(call.module)) is not None
        ),
        quiet_modules=tuple(renamed(plan.quiet_modules)),
        partial_parameters=tuple(renamed(plan.partial_parameters)),
    )
