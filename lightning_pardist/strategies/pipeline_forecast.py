"""What blocks give back in a step on a batch of a given shape, foretold and remembered; the same on every stage.

[Note: shapes of micro-batches] torch finds shapes out by running the user's step once more on garbage, and takes all
micro-batches to be alike. Here every stage foretells them by itself, on fake tensors and a copy without weights: all
stages read the same batch, so they come to the same answer without a word. A batch shape that was not seen before
costs one such run.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.nested import leaves
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.describe.skeleton import Skeleton, Step
from lightning_pardist.specs.parallel_plan import PrecisionPlan
from lightning_pardist.specs.pipeline_plan import Dataflow, Outputs, PipelinePlan

_REMEMBERED = 512
"""Batch shapes; the one that was not used for longest is forgotten."""


class Forecast:
    """Foretells steps of one module that was cut into stages."""

    def __init__(self, skeleton: Skeleton, training_flow: Dataflow) -> None:
        self._skeleton = skeleton
        self._flows: dict[str, Dataflow] = {"training_step": training_flow}
        self._outputs: OrderedDict[Any, Mapping[int, Outputs]] = OrderedDict()
        self.runs = 0
        """Fake runs so far."""

    def flow(self, step: Step, plan: PipelinePlan) -> Dataflow:
        """Returns how values flow in the module's method ``step.entry``.

        Raises:
            ValueError: if stages lack something that the method needs.
        """
        if step.entry not in self._flows:
            self.runs += 1
            try:
                flow, _ = self._skeleton.dataflow(plan.blocks, step)
            except Exception:  # code after the last block may look at values; blocks then say whether all is well
                flow = self._flows["training_step"]
            problem = _problem_of_entry(plan, flow)
            if problem is not None:
                raise ValueError(
                    message(
                        f"{step.entry} must find on every stage what it is computed from there.",
                        got=problem,
                        source=f"{step.entry}, run on fake tensors, against the plan made for training_step",
                        change=f"compute the same in training_step, or move that out of {step.entry}",
                    )
                )
            self._flows[step.entry] = flow
        return self._flows[step.entry]

    def outputs(self, step: Step, blocks: Sequence[str], key: Any) -> Mapping[int, Outputs]:
        """Returns what every block gives back.

        Args:
            step: with one micro-batch.
            blocks: their names.
            key: what else than the batch's shapes decides the answer.

        Raises:
            ValueError: on all stages alike, if the step cannot be run on fake tensors.
        """
        known = (step.entry, signature(step.batch), key)
        if known in self._outputs:
            self._outputs.move_to_end(known)
            return self._outputs[known]
        self.runs += 1
        try:
            found = self._skeleton.outputs(blocks, step)
        except Exception as error:
            raise self._refusal(step, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        if len(found) < len(blocks):
            missing = [name for index, name in enumerate(blocks) if index not in found]
            raise self._refusal(step, f"it does not call {', '.join(missing[:3])}")
        self._outputs[known] = found
        if len(self._outputs) > _REMEMBERED:
            self._outputs.popitem(last=False)
        return found

    def _refusal(self, step: Step, got: str) -> ValueError:
        return ValueError(
            message(
                "What crosses a cut between stages is foretold by running the step on fake tensors, up to its last "
                "block.",
                got=got,
                source=f"{step.entry} on a micro-batch of shapes {signature(step.batch)}",
                change="let what runs before and between the blocks depend on shapes, not on values of weights",
            )
        )


def signature(batch: Any) -> tuple[Any, ...]:
    """Returns what of a batch can decide shapes: those of its tensors, and its numbers."""
    found: list[Any] = []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), str(leaf.dtype)))
        elif isinstance(leaf, (bool, int, float)):
            found.append(leaf)
        else:
            found.append(type(leaf).__name__)
    return tuple(found)


_forecasts: weakref.WeakKeyDictionary[LightningModule, Forecast] = weakref.WeakKeyDictionary()


def remember_forecast(module: LightningModule, forecast: Forecast) -> None:
    """Keeps a module's forecast for the Trainers that it will meet later."""
    _forecasts[module] = forecast


def recall_forecast(module: LightningModule) -> Forecast:
    """Returns the forecast of a module that was cut into stages."""
    return _forecasts[module]


def new_skeleton(module: nn.Module, device: torch.device, precision: PrecisionPlan) -> Skeleton:
    """Returns the weightless copy, made before the module is cut."""
    gathered = None if precision.gather_dtype is None else dtype_from_word(precision.gather_dtype)
    return Skeleton(module, device, torch.bfloat16 if precision.name == "bf16-mixed" else None, gathered)


def _problem_of_entry(plan: PipelinePlan, flow: Dataflow) -> str | None:
    """Returns, in words, what another step than the planned one needs and its stages lack; None if all is there."""
    owners = [plan.stage_of(block).index for block in flow.order]
    for before, after, block in zip(owners, owners[1:], flow.order[1:], strict=False):
        if after < before:
            return f"it calls {flow.blocks[block]}, of stage {after}, after blocks of stage {before}"
    for name, calls in zip(flow.blocks, flow.calls, strict=True):
        if calls > 1:
            return f"it calls {name} {calls} times, and a stage runs its blocks once per micro-batch"
    for stage in plan.stages:
        lacking = sorted(set(flow.needed_by(stage.first, stage.stop)) - plan.held_by(stage.rank))
        if lacking:
            return f"stage {stage.index} needs {', '.join(lacking[:4])}, which its training step does not use there"
        hidden: Mapping[int, tuple[int, ...]] = {
            target: flow.needs[target].insides for target in range(stage.first, len(flow.blocks) + 1)
        }
        for target, blocks in hidden.items():
            if any(block < stage.first for block in blocks):
                reader = flow.blocks[target] if target < len(flow.blocks) else "the code after the last block"
                return f"{reader} reads what an earlier stage's block keeps to itself"
    return None
