"""HybridStrategy's side of pipeline parallelism: Lightning's steps become runs of a schedule."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.describe.skeleton import Step
from lightning_pardist.parallel_model import ParallelModel, PipelineCut
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.run.microbatches import batch_rows, merge_outputs, split_batch
from lightning_pardist.run.pipeline import (
    PipelineRunner,
    StepRequest,
    pipeline_broadcast,
    pipeline_gather,
)
from lightning_pardist.run.pipeline_orders import microbatch_sizes
from lightning_pardist.run.stage_program import Failure, MicroBatch, StepRun
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import Dataflow
from lightning_pardist.strategies.kept_gradients import KeptGradients
from lightning_pardist.strategies.loss_weights import loss_weights
from lightning_pardist.strategies.metrics import StepLogs
from lightning_pardist.strategies.pipeline_forecast import recall_forecast
from lightning_pardist.strategies.pipeline_logs import (
    Joined,
    MetricStates,
    MicroLogs,
    as_logged,
    local_arguments,
    to_device,
    to_host,
)
from lightning_pardist.strategies.schedules import custom_orders
from lightning_pardist.strategies.step_effects import StepEffects
from lightning_pardist.strategies.timeline import write_timeline
from lightning_pardist.strategies.user_step import UserStep

log = get_logger(__name__)

_SEED_STEP = 1_000_003
_PREPARING = "before the step: "


@dataclass
class StepDone:
    """A step of the whole batch, as every stage sees it."""

    output: Any
    logs: list[Joined]
    failures: list[Failure]
    """Of this rank alone."""
    sizes: list[int]


@dataclass(frozen=True)
class _Prepared:
    """A step in micro-batches."""

    sizes: list[int]
    parts: list[Any]
    weights: list[float]
    flow: Dataflow
    micros: list[MicroBatch]


class Pipelining:
    """Runs the steps of one spread module, on every rank of its pipeline."""

    def __init__(
        self,
        module: LightningModule,
        model: ParallelModel,
        options: PipelineOptions,
        logs: StepLogs,
        *,
        keeps_apart: bool,
    ) -> None:
        """Starts before the first step.

        Args:
            module: the user's.
            model: the same, spread.
            options: the user's choices.
            logs: takes over ``self.log``.
            keeps_apart: a step's gradients must be droppable, so they are not added to earlier ones at once.
        """
        assert model.pipeline is not None and model.meshes is not None
        self._module = module
        self._model = model
        self._cut: PipelineCut = model.pipeline
        self._options = options
        self._logs = logs
        self._runner = PipelineRunner(model, custom_orders(options))
        self.gradients = KeptGradients(model, self._runner, keeps_apart=keeps_apart)
        """Of the last training step."""
        self._metrics = MetricStates(module)
        self._effects = StepEffects(module)
        self._warned_of_names = False
        self._is_loss_rank = self._cut.rank == self._cut.plan.loss_rank
        self._wants_timeline = options.timeline is not None
        self._steps = 0

    def tell_actions(self, at_action: Callable[[str, int, int], None]) -> None:
        """Has every action of later steps told before it runs: its kind, stage and micro-batch."""
        self._runner.at_action = at_action

    # ---- training

    def forward_backward(self, step: UserStep, device: torch.device) -> StepDone:
        """Runs a training step's schedule; its gradients wait on the parameters for ``gradients.keep``."""
        trainer = self._module.trainer
        accumulate = trainer.accumulate_grad_batches
        batch_idx = step.args[1] if len(step.args) > 1 else step.kwargs.get("batch_idx", self._steps)
        is_first = batch_idx % accumulate == 0  # as Lightning decides whether to clear gradients
        self.gradients.before_step(is_first=is_first)
        self._steps += 1
        timed = self._wants_timeline and self._steps == 3  # past what first steps do once
        self._runner.moments = [] if timed else None
        done = self._run(step, device, training=True, scale=1.0 / accumulate)
        if timed:
            self._write_timeline()
        if self._steps == 1 and not done.failures:
            self._warn_of_a_leak(done.output)
        return done

    def _warn_of_a_leak(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if self._is_loss_rank and isinstance(loss, Tensor) and bool(loss.isnan().any()):
            log.warning(
                "the first loss is NaN: either the model gives it in one process too, or a value made from weights of "
                "another stage, which are NaN here, got past the cut. Not on this stage: %s",
                ", ".join(sorted(self._cut.absent)[:8]),
            )

    def replay(self, done: StepDone, device: torch.device) -> tuple[list[Any], list[Joined]]:
        """Returns a training step's logged values: those to be combined over data ranks, and all others."""
        combined, others = [], []
        for joined in done.logs:
            logged = as_logged(joined, self._module, device)
            if logged is None:
                others.append(joined)
            else:
                combined.append(logged)
        return combined, others

    def log_here(self, values: Sequence[Joined], device: torch.device) -> None:
        """Logs values on this rank as they are."""
        for joined in values:
            value, arguments = local_arguments(joined, self._module, device)
            self._logs.log_here(joined.name, value, arguments)

    # ---- evaluation

    def evaluate(self, step: UserStep, device: torch.device, *, silent: bool = False) -> Any:
        """Returns the output of a validation, test or predict step of the whole batch; logs it on every rank.

        Raises:
            StepFailedError: on every stage, if the user's code failed on any.
        """
        done = self._run(step, device, training=False, scale=1.0)
        self._raise_failures(done.failures, step.entry, everywhere=self._model.kind == "shard")
        if not silent:
            self.log_here(done.logs, device)
        return done.output

    def compare_names(self, names: Collection[str]) -> None:
        """Warns once of values that hooks log on some stages only, where each looked at its own parameters."""
        if self._warned_of_names:
            return
        found = [frozenset(part) for part in pipeline_gather(sorted(names), self._model)]
        apart = sorted(frozenset().union(*found) - frozenset.intersection(*found))
        if not apart:
            return
        self._warned_of_names = True
        if torch.distributed.get_rank() == 0:
            log.warning(
                "%s and %d other value(s) are logged on some stages of the pipeline only. Outside of steps a stage has "
                "the weights and gradients of its own blocks: sums over them, as of grad_norm(), are its own too",
                apart[0].split(".", 1)[-1], len(apart) - 1,
            )  # fmt: skip

    def sync_metrics(self) -> None:
        """Gives the last stage's metrics to the other stages; called before anybody computes them."""
        if not self._metrics.has_any:
            return
        states = pipeline_broadcast(self._metrics.changed() if self._is_loss_rank else None, self._model)
        if not self._is_loss_rank:
            self._metrics.take(states)

    # ---- one step

    def _run(self, step: UserStep, device: torch.device, *, training: bool, scale: float) -> StepDone:
        try:
            prepared = self._prepare(step, training=training, scale=scale)
        except Exception as error:  # the same on all stages, which read the same batch; other pipelines hear of it
            return StepDone(None, [], [Failure(0, 0, _PREPARING, error)], [])
        logs = MicroLogs(self._module)
        around = self._around(step, prepared.parts, logs)
        self._effects.start()
        run = self._runner.run(StepRequest(prepared.micros, prepared.flow, training, around))
        return self._share(run, logs, prepared, device)

    def _prepare(self, step: UserStep, *, training: bool, scale: float) -> _Prepared:
        sizes = microbatch_sizes(self._cut.plan, batch_rows(step.batch), is_custom=self._options.is_custom)
        parts = split_batch(step.batch, sizes)
        weights = loss_weights(self._options, step.batch, parts, sizes) if training else even_weights(sizes)
        forecast, plan = recall_forecast(self._module), self._cut.plan
        asked = [Step(step.entry, part, step.args[1:]) for part in parts]
        flow = forecast.flow(asked[0], plan)
        key = (training, self._module.training, tuple(p.requires_grad for p in self._module.parameters()))
        micros = [
            MicroBatch(
                run=self._call(step, part),
                weight=weight * scale,
                outputs=forecast.outputs(one, plan.blocks, key),
                seed=self._seed(index) if training and plan.draws_random else None,
            )
            for index, (part, weight, one) in enumerate(zip(parts, weights, asked, strict=True))
        ]
        return _Prepared(sizes, parts, weights, flow, micros)

    def _call(self, step: UserStep, part: Any) -> Callable[[], Any]:
        return lambda: step.on(self._module, part)

    def _around(
        self, step: UserStep, parts: Sequence[Any], logs: MicroLogs
    ) -> Callable[[int, bool], AbstractContextManager[None]]:
        @contextmanager
        def around(micro: int, is_last: bool) -> Iterator[None]:
            def sink(name: str, value: Any, arguments: dict[str, Any]) -> None:
                logs.note(micro, parts[micro], name, value, arguments)

            logging = self._logs.handing_over(sink) if is_last else self._logs.silent()
            with logging, step.context(), self._effects.around(is_last=is_last):
                yield

        return around

    def _share(self, run: StepRun, logs: MicroLogs, prepared: _Prepared, device: torch.device) -> StepDone:
        """Gives every stage what the last one has."""
        sizes, weights = prepared.sizes, prepared.weights
        payload: Any = None
        output = None
        if self._is_loss_rank and not run.failures:
            try:
                output = self._merged(run, sizes, weights)
                payload = pickle.dumps((to_host(output), logs.joined(), self._effects.joined(sizes, weights)))
            except Exception as error:  # in the user's reduce_fx, or an output that cannot be sent
                run.fail(len(self._cut.plan.stages) - 1, len(sizes) - 1, "joining what micro-batches returned", error)
        payload = pipeline_broadcast(payload, self._model)
        if payload is None:
            return StepDone(None, [], run.failures, sizes)
        theirs, joined, effects = pickle.loads(payload)
        if not self._is_loss_rank:
            self._effects.take(effects, device)
        output = output if self._is_loss_rank else to_device(theirs, device)
        return StepDone(output, joined, run.failures, sizes)

    def _merged(self, run: StepRun, sizes: list[int], weights: list[float]) -> Any:
        results = [run.results[micro] for micro in range(len(sizes))]
        missing = [micro for micro, result in enumerate(results) if result is None]
        if missing and len(missing) < len(results):
            raise ValueError(
                message(
                    "A step must return something for all micro-batches of a batch, or None for all.",
                    got=f"None for micro-batch(es) {missing} of {len(results)}",
                    source="the step's return value",
                    change="decide by the batch, not by its parts, or use PipelineOptions(num_microbatches=1)",
                )
            )
        return None if missing else merge_outputs(results, sizes, weights)

    def _seed(self, micro: int) -> int:
        assert self._model.meshes is not None
        step = self._module.trainer.fit_loop.epoch_loop.total_batch_idx + 1
        mixed = self._cut.seed + _SEED_STEP * (step * 4096 + micro) + 97 * self._model.meshes.data_parallel_rank
        return mixed % 2**62

    # ---- errors

    def raise_failures(self, done: StepDone, entry: str) -> None:
        """Raises the user's error on all ranks of all pipelines; each of them must call it."""
        self._raise_failures(done.failures, entry, everywhere=True)

    def _raise_failures(self, failures: Sequence[Failure], entry: str, *, everywhere: bool) -> None:
        mine = [(f.order, _described(f)) for f in failures]
        found = gather_objects(mine, self._model.meshes) if everywhere else pipeline_gather(mine, self._model)
        every = sorted(item for part in found for item in part)
        if not every:
            return
        text = f"{entry}: {every[0][1]}"
        if any(order[0] == 0 and text.startswith(_PREPARING) for order, text in every):
            raise ValueError(every[0][1].removeprefix(_PREPARING))
        own = next((f.error for f in failures if _described(f) == every[0][1]), None)
        raise StepFailedError(text) from own

    def _write_timeline(self) -> None:
        moments = self._runner.moments or []
        self._runner.moments = None
        everything = gather_objects(moments, self._model.meshes)
        if self._model.meshes is not None and torch.distributed.get_rank() == 0:
            assert self._options.timeline is not None
            first = [m for part in everything[:: self._model.meshes.data_parallel_size] for m in part]
            write_timeline(self._options.timeline, first, self._cut.plan)


class StepFailedError(RuntimeError):
    """The user's code failed on one stage; raised on every rank, with the stage and the micro-batch."""


def even_weights(sizes: Sequence[int]) -> list[float]:
    """Returns each part's share of the rows."""
    total = sum(sizes)
    return [size / total for size in sizes]


def _described(failure: Failure) -> str:
    error = failure.error
    if failure.phase == _PREPARING:
        return f"{_PREPARING}{error}"
    where = f"stage {failure.stage} failed in micro-batch {failure.micro} ({failure.phase})"
    return f"{where}: {type(error).__name__}: {error}"
