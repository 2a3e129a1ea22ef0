"""Runs whole steps of a module that was cut into stages, by torch's schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_pardist import torch_pipelining_api as api
from lightning_pardist.base.torch_api import checkpoints_without_reentry
from lightning_pardist.mesh import stage_groups
from lightning_pardist.parallel_model import ROOT_CALL, ParallelModel
from lightning_pardist.run.pipeline_orders import plain_orders, splits_well, training_orders, usable_schedule
from lightning_pardist.run.reduce import average_gradients, average_scalars
from lightning_pardist.run.shared_gradients import SharedGradients
from lightning_pardist.run.stage_program import MicroBatch, StageProgram, StepRun, value_shapes
from lightning_pardist.run.step import model_device
from lightning_pardist.run.tensor_gradients import PartialGradients
from lightning_pardist.run.unused import UsedInStep
from lightning_pardist.specs.pipeline_plan import Dataflow, Orders, PipelinePlan


@dataclass(frozen=True)
class Moment:
    """One action in time, as measured."""

    rank: int
    stage: int
    kind: str
    micro: int
    start: float
    end: float


@dataclass(frozen=True)
class StepRequest:
    """A step to run."""

    micros: Sequence[MicroBatch]
    flow: Dataflow
    """How values flow in this step."""
    training: bool
    around: Callable[[int, bool], Any]


class PipelineRunner:
    """Runs steps on one rank; every rank of the pipeline calls each method."""

    def __init__(self, model: ParallelModel, custom: Orders | None) -> None:
        assert model.pipeline is not None and model.meshes is not None
        self._model = model
        self._plan = model.pipeline.plan
        self._custom = custom
        self._device = model_device(model)
        group = model.meshes.pipeline_group
        own = self._plan.stages_of(model.pipeline.rank)
        self._programs = [StageProgram(model.pipeline, stage, model.module) for stage in own]
        self._stages = [
            api.UserStage(program, program.stage.index, len(self._plan.stages), self._device, group)
            for program in self._programs
        ]
        self._to_rank = {stage.index: stage.rank for stage in self._plan.stages}
        for stage in self._stages:
            stage.stage_index_to_group_rank = self._to_rank
        api.meet_neighbours(self._stages)
        self._schedules: dict[tuple[int, bool], Any] = {}
        sets = list(dict.fromkeys(ranks for _, ranks in self._plan.shared_parameters))
        self._shared = SharedGradients(model, stage_groups(model.meshes, sets))
        self._partial = PartialGradients(model) if model.plan.tensor is not None else None
        self.moments: list[Moment] | None = None
        """Set to a list to have the actions of the next steps measured."""
        self.at_action: Callable[[str, int, int], None] = lambda kind, stage, micro: None
        """Told of every action before it runs: its kind, stage and micro-batch."""

    @property
    def plan(self) -> PipelinePlan:
        """The pipeline's plan."""
        return self._plan

    @property
    def _root(self) -> FSDPModule | None:
        return cast(FSDPModule, self._model.module) if self._model.kind == "shard" else None

    def run(self, request: StepRequest) -> StepRun:
        """Runs all micro-batches, forward and (in training) backward; gradients add up on the parameters."""
        run = StepRun(
            micros=request.micros,
            receives={s.index: request.flow.crossing(s.first) if s.index else () for s in self._plan.stages},
            sends={
                s.index: () if s.stop == len(self._plan.blocks) else request.flow.crossing(s.stop)
                for s in self._plan.stages
            },
            training=request.training,
            around=request.around,
            root_call=self._root_call(),
            device=self._device,
            rewritten=frozenset(request.flow.rewritten),
        )
        schedule = self._schedule(len(request.micros), training=request.training)
        for program, stage in zip(self._programs, self._stages, strict=True):
            program.run = run
            index = program.stage.index
            traffic = [
                api.Traffic(value_shapes(micro, run.receives[index]), value_shapes(micro, run.sends[index]))
                for micro in request.micros
            ]
            stage.watch = self._watch(run)
            reaches_back = all(tensor.requires_grad for part in traffic for tensor in part.receives)
            splits = reaches_back and splits_well(request.flow, program.stage)
            stage.backward_is_whole = not splits
            stage.prepare(traffic, has_backward=request.training)
        for shard in self._model.shards:
            shard.take_gradient()
        if self._root is not None:
            api.begin_whole_gradients(self._root)
        draws = request.training and self._plan.draws_random
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with (
                self._model.shown(),
                torch.random.fork_rng(devices=devices) if draws else nullcontext(),
                checkpoints_without_reentry(self._note_checkpoint),
            ):
                kwargs = [{"micro": micro} for micro in range(len(request.micros))]
                api.run_schedule(schedule, kwargs, has_backward=request.training)
        finally:
            for program in self._programs:
                program.run = None
            for shard in self._model.shards:
                shard.publish_gradient()
        return run

    def finish_gradients(self, *, reduce_shards: bool, window_ends: bool) -> None:
        """Makes gradients of the micro-batches' sums: over data ranks, and over stages that hold the same weight.

        Args:
            reduce_shards: reduce what a sharded module has summed up whole; every data rank must say the same.
            window_ends: this was the last step before the optimizer's.
        """
        model = self._model
        if self._root is not None and reduce_shards:
            used = UsedInStep(model) if model.plan.data_parallel.find_unused_parameters else None
            api.reduce_whole_gradients(self._root)
            if used is not None:
                used.drop_unused()
        if not window_ends:
            return
        for shard in model.shards:
            shard.take_gradient()  # earlier micro-steps' gradients have been added to the DTensor's
        if model.kind == "replicate":
            average_gradients(model, agree=False)
        if model.kind == "shard":
            average_scalars(model)
        for shard in model.shards:
            shard.publish_gradient()
        if self._partial is not None:
            self._partial.end_window()
        self._shared.add_up()

    def drop_gradients(self) -> None:
        """Forgets what a sharded module has summed up whole and not reduced."""
        if self._root is not None:
            api.drop_whole_gradients(self._model.module)

    def _note_checkpoint(self) -> None:
        """Has the stage that runs do its backward passes whole: in two halves, it would recompute once per weight."""
        for program, stage in zip(self._programs, self._stages, strict=True):
            if program.is_running:
                stage.backward_is_whole = True

    def _root_call(self) -> Callable[[Callable[[], Any]], Any]:
        """Returns what runs a function on whole parameters, or on this rank's share of them on a tensor axis."""
        mode = self._model.tensor_mode
        on_shares: Callable[[Callable[[], Any]], Any] = (lambda fn: fn()) if mode is None else mode.run
        if self._root is None:
            return on_shares
        call = cast(Callable[[Callable[[], Any]], Any], getattr(self._model.module, ROOT_CALL))
        return lambda fn: call(partial(on_shares, fn))

    def _watch(self, run: StepRun) -> Callable[[str, int, int, Callable[[], Any]], Any]:
        rank = self._programs[0].stage.rank

        def watch(kind: str, stage: int, micro: int, action: Callable[[], Any]) -> Any:
            self.at_action(kind, stage, micro)
            start = self._now()
            try:
                return action()
            except Exception as error:
                if kind == "F":
                    raise
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                run.fail(stage, micro, "backward", cause)
                raise api.BackwardFailed from error
            finally:
                if self.moments is not None:
                    self.moments.append(Moment(rank, stage, kind, micro, start, self._now()))

        return watch

    def _now(self) -> float:
        if self.moments is None:
            return 0.0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    # ---- schedules

    def _schedule(self, microbatches: int, *, training: bool) -> Any:
        key = (microbatches, training)
        if key not in self._schedules:
            if training:
                self._schedules[key] = self._training_schedule(microbatches)
            else:
                # torch takes no schedule without backward passes; stages leave them out.
                orders = plain_orders(self._plan, microbatches)
                self._schedules[key] = api.build_custom_schedule(orders, self._stages, microbatches)
        for stage in self._stages:
            stage.stage_index_to_group_rank = self._to_rank
        return self._schedules[key]

    def _training_schedule(self, microbatches: int) -> Any:
        name = None if self._custom is not None else usable_schedule(self._plan, microbatches)
        if name is not None:
            return api.build_schedule(name, self._stages, microbatches)
        orders = training_orders(self._plan, self._custom, microbatches)
        return api.build_custom_schedule(orders, self._stages, microbatches)


def pipeline_broadcast(value: Any, model: ParallelModel) -> Any:
    """Returns the value of the rank with the loss on all stages of its pipeline; a picklable one."""
    assert model.pipeline is not None and model.meshes is not None
    box = [value]
    dist.broadcast_object_list(box, group=model.meshes.pipeline_control, group_src=model.pipeline.plan.loss_rank)
    return box[0]


def pipeline_gather(value: Any, model: ParallelModel) -> list[Any]:
    """Returns every stage rank's value, by rank of the pipeline."""
    assert model.meshes is not None
    group = model.meshes.pipeline_control
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
