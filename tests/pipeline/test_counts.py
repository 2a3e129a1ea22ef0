"""The exact figures of a pipeline's step: activations alive, gathers and reductions, against what a hand counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.support.traffic import Collective, CollectiveRecorder, Traffic, axis_ranks, planned, totals
from lightning_pardist import HybridStrategy
from lightning_pardist.specs.pipeline_options import PipelineOptions
from tests.pipeline.test_schedules import GOLDEN
from tests.strategies.common import FEATURES, Block, Tower, loader, make_trainer

BLOCKS, MICROS = 8, 8
LIMITS = {
    "gpipe": MICROS, "1f1b": 4, "interleaved_1f1b": 5.5, "looped_bfs": MICROS, "interleaved_zero_bubble": 4,
    "zbv_zero_bubble": 4, "dualpipev": 4.5,
}  # fmt: skip
"""Micro-batches alive on four ranks, from the papers."""


class Held:
    """A saved tensor; gone when autograd lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class CountedBlock(Block):
    """Counts the activations that its backward passes still need."""

    alive: ClassVar[weakref.WeakSet[Held]] = weakref.WeakSet()
    most = 0
    per_call = 0

    def forward(self, x: Tensor) -> Tensor:
        before = len(self.alive)
        with saved_tensors_hooks(self._keep, lambda held: held.tensor):
            y = super().forward(x)
        CountedBlock.per_call = len(self.alive) - before
        CountedBlock.most = max(CountedBlock.most, len(self.alive))
        return y

    def _keep(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        self.alive.add(held)
        return held


class Counted(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CountedBlock() for _ in range(BLOCKS)])


def most_alive(schedules: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Returns, by schedule, the most micro-batches of this rank's stages that were alive at once, and the plan's."""
    found = {}
    for schedule in schedules:
        torch.manual_seed(0)
        options = PipelineOptions(schedule=schedule, num_microbatches=MICROS, split=_evenly(schedule))
        layout = {"pipeline_parallel_size": dist.get_world_size(), "pipeline": options}
        trainer = make_trainer(layout, dist.get_world_size(), max_steps=1, num_sanity_val_steps=0)
        CountedBlock.most = 0
        trainer.fit(Counted(), loader(2 * MICROS, MICROS))
        assert not CountedBlock.alive, "activations outlive their step"
        strategy = trainer.strategy
        assert isinstance(strategy, HybridStrategy) and strategy.plan is not None
        plan = strategy.plan.pipeline
        assert plan is not None
        blocks = BLOCKS // dist.get_world_size()
        found[schedule] = CountedBlock.most / (CountedBlock.per_call * blocks), plan.alive
    return found


def _evenly(schedule: str) -> list[int]:
    stages = dist.get_world_size() * GOLDEN[schedule][0]
    return [BLOCKS // stages] * stages


def test_micro_batches_alive_are_those_of_the_schedule(run_distributed: Any) -> None:
    results = run_distributed(most_alive, tuple(GOLDEN), world_size=4)
    counted = {name: max(result[name][0] for result in results) for name in GOLDEN}
    assert counted == LIMITS
    assert counted == {name: foretold for name, (_, foretold) in results[0].items()}


class Watch(L.Callback):
    """Records every collective of the steps from the second on, the optimizer's and the agreements' included."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.windows: list[list[Collective]] = []
        self._recorder: CollectiveRecorder | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index >= self.accumulate and index % self.accumulate == 0:
            self._recorder = CollectiveRecorder()
            self._recorder.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self._recorder is not None and (index + 1) % self.accumulate == 0:
            self._recorder.__exit__(None, None, None)
            self.windows.append(self._recorder.collectives)
            self._recorder = None


class Tied(Counted):
    """Its first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(FEATURES, FEATURES, bias=False)
        self.skip.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.skip(x)).squeeze(-1)


@dataclass(frozen=True)
class Seen:
    """What one rank saw."""

    windows: list[list[Collective]]
    planned: Traffic
    everyone: tuple[int, ...]
    shard: tuple[int, ...]
    line: tuple[int, ...]
    """Ranks of this pipeline."""
    shapes: dict[str, tuple[int, ...]]
    """Of the parameters that this rank holds."""


def watch(zero_stage: int, schedule: str, accumulate: int) -> Seen:
    """Trains three windows under PP 2 x FSDP 2, clipped by norm."""
    torch.manual_seed(0)
    layout = {
        "pipeline_parallel_size": 2,
        "data_parallel_replicate_size": 1,
        "data_parallel_shard_size": 2,
        "zero_stage": zero_stage,
        "pipeline": PipelineOptions(schedule=schedule, num_microbatches=MICROS),
    }
    recorder = Watch(accumulate)
    trainer = make_trainer(layout, 4, callbacks=[recorder], accumulate_grad_batches=accumulate, gradient_clip_val=0.1)
    module = Tied()
    trainer.fit(module, loader(3 * 2 * accumulate * MICROS, MICROS))
    strategy: Any = trainer.strategy
    absent, meshes = strategy.parallel_model.pipeline.absent, strategy.meshes
    return Seen(
        windows=recorder.windows,
        planned=planned(strategy.plan, meshes),
        everyone=tuple(range(4)),
        shard=axis_ranks(meshes, "data_parallel_shard"),
        line=axis_ranks(meshes, "pipeline_parallel"),
        shapes={name: tuple(p.shape) for name, p in module.named_parameters() if name not in absent},
    )


def padded(shapes: Mapping[str, tuple[int, ...]], shards: int) -> int:
    """Elements after dim 0 of every parameter is rounded up to a multiple of the shards."""
    return sum(math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) for shape in shapes.values())


CASES = {
    # ZeRO stage, schedule, steps per window -> gathers, reductions of every unit per window
    (3, "1f1b", 1): (1, 1),
    (3, "zbv_zero_bubble", 1): (1, 1),
    (3, "interleaved_1f1b", 3): (3, 3),
    (1, "1f1b", 3): (1, 1),
}


@pytest.mark.parametrize(("zero_stage", "schedule", "accumulate"), list(CASES))
def test_a_stage_is_gathered_and_reduced_once_a_step(
    run_distributed: Any, zero_stage: int, schedule: str, accumulate: int
) -> None:
    gathers, reductions = CASES[zero_stage, schedule, accumulate]
    crossings = GOLDEN[schedule][0] * 2 - 1  # cuts
    if schedule == "zbv_zero_bubble":
        crossings -= 1  # in the middle of the V both stages are on one rank
    everyone = run_distributed(watch, zero_stage, schedule, accumulate, world_size=4)
    for seen in everyone:
        units = BLOCKS // 2 + any(not name.startswith("blocks.") for name in seen.shapes)  # what is left is the root's
        nbytes = 4 * padded(seen.shapes, 2)
        data = {
            ("all_gather", seen.shard): (gathers * units, gathers * nbytes),
            ("reduce_scatter", seen.shard): (reductions * units, reductions * nbytes),
        }
        if schedule != "zbv_zero_bubble":  # there both ends are on one rank
            shared = FEATURES * FEATURES // 2  # of the weight's shard
            data["all_reduce", seen.line] = (1, 4 * (shared + 1))  # and whether a stage has a gradient
        # One row of a micro-batch for each cut, one gradient back; every rank is at one end of each.
        passed = accumulate * MICROS * crossings
        stages = {(kind, seen.line): (passed, passed * FEATURES * 4) for kind in ("send", "receive")}
        assert len(seen.windows) == 2
        for window in seen.windows:
            assert totals(window, "data") == data
            assert totals(window, "stages") == stages
            assert totals(window, "clip") == {("all_reduce", seen.everyone): (1, 4)}
    if accumulate == 1:
        for kind in ("all_gather", "reduce_scatter"):
            counted = [totals(seen.windows[0], "data")[kind, seen.shard] for seen in everyone]
            assert max(counted) == everyone[0].planned[kind, everyone[0].shard]
