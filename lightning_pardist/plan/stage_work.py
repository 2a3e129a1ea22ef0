"""What the ranks of a pipeline do in a step, from what each stage does with one micro-batch and from the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pardist.base import axes
from lightning_pardist.plan.schedule_simulator import Simulation, simulate
from lightning_pardist.specs.estimate import RankWork
from lightning_pardist.specs.parallel_plan import Traffic
from lightning_pardist.specs.pipeline_plan import Action, Leaf, Orders, Outputs, PipelinePlan, StagePlan


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One forward and backward pass of a stage (of the whole step, without stages) on a rank's shares."""

    flops_forward: int
    flops_backward: int
    activation_bytes: int | None
    """Kept between the two; what the stage receives is not among them, what it sends is."""
    exchanges: tuple[tuple[str, int], ...] = ()
    """Kind and bytes of every collective on the tensor axis."""


def exchange_traffic(exchanges: Sequence[tuple[str, int]], times: int, share: float) -> tuple[Traffic, ...]:
    """Returns the exchanges of ``times`` micro-batches, which are together ``share`` times as large as the counted."""
    totals: dict[str, tuple[int, int]] = {}
    for kind, nbytes in exchanges:
        count, total = totals.get(kind, (0, 0))
        totals[kind] = count + 1, total + nbytes
    return tuple(
        Traffic(collective=kind, axis=axes.TENSOR_PARALLEL, count=count * times, nbytes=round(total * share))  # type: ignore[arg-type]
        for kind, (count, total) in totals.items()
    )


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A whole step of a pipeline, foretold."""

    plan: PipelinePlan
    orders: Orders
    sizes: Sequence[int]
    """Rows of the micro-batches."""
    outputs: Sequence[Mapping[int, Outputs]]
    """By micro-batch, what blocks give back."""
    runs: Mapping[int, StageRun]
    """By stage, of the largest micro-batch."""
    plain_runs: Mapping[int, StageRun]
    """The same without recomputation."""
    whole_backward: frozenset[int]
    """Stages whose backward pass is not cut in two, though the schedule would."""

    @cached_property
    def simulation(self) -> Simulation:
        """When every action runs, one FLOP a unit of time."""
        if any(run.flops_forward for run in self.runs.values()):
            return simulate(self.orders, self._cost)
        return simulate(self.orders)

    def work(self) -> tuple[RankWork, ...]:
        """Returns the work of every rank of the pipeline."""
        return tuple(self._work(rank) for rank in range(self.plan.ranks))

    def _work(self, rank: int) -> RankWork:
        own = [stage.index for stage in self.plan.stages_of(rank)]
        share = sum(self.sizes) / max(self.sizes)
        backward = sum(self.runs[stage].flops_backward for stage in own)
        plain = sum(self.plain_runs[stage].flops_backward for stage in own)
        exchanges = [each for stage in own for each in self.runs[stage].exchanges]
        return RankWork(
            flops_forward=round(share * sum(self.runs[stage].flops_forward for stage in own)),
            flops_backward=round(share * backward),
            flops_again=round(share * (backward - plain)),
            activation_bytes=self._most_kept(rank),
            stage_buffer_bytes=sum(self._buffers(self.plan.stages[stage]) for stage in own),
            exchanges=exchange_traffic(exchanges, len(self.sizes), share),
            passes=tuple(self._passes(rank)),
        )

    def _cost(self, action: Action) -> float:
        stage, kind, micro = action
        run, share = self.runs[stage], self.sizes[micro] / max(self.sizes)
        if kind in ("F", "O"):
            return share * run.flops_forward
        if kind == "B":
            return share * run.flops_backward
        if stage in self.whole_backward:
            return share * run.flops_backward if kind == "I" else 0.0
        return share * run.flops_backward / 2

    def _most_kept(self, rank: int) -> int | None:
        """Returns the bytes of activations of all micro-batches that are under way at the worst moment."""
        kept = most = 0
        for span in self.simulation.spans[rank]:
            stage, kind, micro = span.action
            nbytes = self.runs[stage].activation_bytes
            if nbytes is None:
                return None
            ends = "BI" if stage in self.whole_backward else "BW"
            sign = 1 if kind in ("F", "O") else -1 if kind in ends else 0
            kept += sign * (nbytes * self.sizes[micro] // max(self.sizes))
            most = max(most, kept)
        return most

    def _buffers(self, stage: StagePlan) -> int:
        received = sum(leaf_bytes(leaf) for micro in self.outputs for leaf in _leaves(micro, stage.receives))
        gradients = (leaf for micro in self.outputs for leaf in _leaves(micro, stage.sends) if leaf.requires_grad)
        return received + sum(leaf_bytes(leaf) for leaf in gradients)

    def _passes(self, rank: int) -> Iterator[Traffic]:
        sent: list[int] = []
        received: list[int] = []
        for before, after in zip(self.plan.stages, self.plan.stages[1:]):
            if before.rank == after.rank or rank not in (before.rank, after.rank):
                continue
            leaves = [leaf for micro in self.outputs for leaf in _leaves(micro, before.sends)]
            forward, backward = (sent, received) if rank == before.rank else (received, sent)
            forward += [leaf_bytes(leaf) for leaf in leaves]
            backward += [leaf_bytes(leaf) for leaf in leaves if leaf.requires_grad]
        if sent:
            yield Traffic(collective="send", axis=axes.PIPELINE_PARALLEL, count=len(sent), nbytes=sum(sent))
        if received:
            yield Traffic(collective="receive", axis=axes.PIPELINE_PARALLEL, count=len(received), nbytes=sum(received))


def leaf_bytes(leaf: Leaf) -> int:
    """Returns the bytes of a tensor among a block's outputs."""
    total = leaf.dtype.itemsize
    for size in leaf.shape:
        total *= size
    return total


def _leaves(outputs: Mapping[int, Outputs], values: Sequence[tuple[int, int]]) -> Iterator[Leaf]:
    for block, index in values:
        yield outputs[block].leaves[index]
