"""Plans of the tensor and the pipeline axis, and the work of ranks on them, for many layouts of one module.

What layouts share is found out once: the roles of weights, how values flow between blocks, what blocks give back for a
batch of some size, and what a stage does with it. Stages of like blocks do alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.entries import Entry
from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.describe.skeleton import Skeleton, Step
from lightning_pardist.plan.pipeline import plan_pipeline
from lightning_pardist.plan.pipeline_input import PipelineInput
from lightning_pardist.plan.stage_work import PipelineStep, StageRun, exchange_traffic
from lightning_pardist.run.microbatches import batch_rows, split_batch
from lightning_pardist.run.pipeline_orders import microbatch_sizes, splits_well, training_orders
from lightning_pardist.specs.block_levers import RecomputePlan
from lightning_pardist.specs.estimate import RankWork
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.module_table import ModuleTable
from lightning_pardist.specs.parallel_plan import ParallelPlan, PrecisionPlan
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import Dataflow, Outputs, PipelinePlan, StagePlan
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.strategies.pipeline_forecast import new_skeleton
from lightning_pardist.strategies.pipeline_staging import cannot_stage, flow_or_reason
from lightning_pardist.strategies.rank_runs import StepToRun, run_step
from lightning_pardist.strategies.schedules import custom_orders, schedule_table
from lightning_pardist.strategies.tensor_planning import unproved_plan

NO_RECOMPUTATION = RecomputePlan()


@dataclass(frozen=True, kw_only=True)
class Described:
    """A module and a batch, described."""

    module: nn.Module
    batch: Any
    entry: Entry
    profile: ModelProfile
    table: ModuleTable
    precision: PrecisionPlan
    """As where nothing is sharded."""
    device: torch.device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Of ``torch.autocast`` around the step."""
        return torch.bfloat16 if self.precision.name == "bf16-mixed" else None


@dataclass(frozen=True)
class Work:
    """What all ranks do."""

    ranks: tuple[RankWork, ...]
    """By rank of the pipeline."""
    idle_share: float
    notes: tuple[str, ...] = ()


@dataclass
class ModelAxes:
    """The axes that cut the model, for one described module."""

    described: Described
    _known: dict[Any, Any] = field(default_factory=dict)

    # ---- plans

    def tensor_plan(self, size: int, options: TensorOptions) -> TensorPlan:
        """Returns the plan of the tensor axis; nothing is proved by numbers here.

        Raises:
            ValueError: as the strategy's.
        """
        d = self.described

        def make() -> TensorPlan:
            roles = self._once("roles", lambda: derive_roles(d.module, d.batch, entry=d.entry, device=d.device))
            return unproved_plan(d.module, d.profile, roles, size, options)

        return self._once(("tensor", size, repr(options)), make)

    def pipeline_plan(self, ranks: int, options: PipelineOptions, precision: PrecisionPlan) -> PipelinePlan:
        """Returns the plan of the pipeline axis.

        Raises:
            ValueError: as the strategy's.
        """
        d = self.described
        return plan_pipeline(
            PipelineInput(
                table=d.table,
                profile=d.profile,
                dataflow=self._flow(precision),
                options=options,
                ranks=ranks,
                schedules=schedule_table(options),
            )
        )

    def _flow(self, precision: PrecisionPlan) -> Dataflow:
        d = self.described
        if d.profile.source != "fake_run" or d.entry != "training_step":
            reason = d.profile.fallback_reason or f"the batch is meant for {d.entry}"
            raise cannot_stage(d.module, reason, "mend the line that is named, or give a batch of the training data")
        blocks = [block.name for block in d.profile.called_blocks()]
        flow = self._once(
            ("flow",), lambda: flow_or_reason(self._skeleton(precision), blocks, d.batch)
        )  # fmt: skip
        if isinstance(flow, str):
            raise cannot_stage(d.module, flow, "mend the line that is named")
        return flow

    def _skeleton(self, precision: PrecisionPlan) -> Skeleton:
        d = self.described
        return self._once(("skeleton", precision.gather_dtype), lambda: new_skeleton(d.module, d.device, precision))

    # ---- work

    def work(self, plan: ParallelPlan, options: PipelineOptions) -> Work:
        """Returns what ranks do in a step.

        Raises:
            ValueError: if the step cannot be run on a rank's shares.
        """
        notes = tuple(self._notes(plan))
        if plan.pipeline is None:
            run = self._stage_run(plan, self.described.batch, None, {}, plan.recompute)
            plain = self._stage_run(plan, self.described.batch, None, {}, NO_RECOMPUTATION)
            work = RankWork(
                flops_forward=run.flops_forward,
                flops_backward=run.flops_backward,
                flops_again=run.flops_backward - plain.flops_backward,
                activation_bytes=run.activation_bytes,
                exchanges=exchange_traffic(run.exchanges, 1, 1.0),
            )
            return Work(ranks=(work,), idle_share=0.0, notes=notes)
        step = self._pipeline_step(plan, plan.pipeline, options)
        if len(set(step.sizes)) > 1:
            notes = (*notes, f"micro-batches of {max(step.sizes)} and {min(step.sizes)} rows: bytes in proportion")
        if any(kind in "IW" for actions in step.orders.values() for _, kind, _ in actions):
            what = "backward passes in two halves: activations kept between the two are not foretold"
            notes = (*notes, f"{what}; at most those of all {len(step.sizes)} micro-batches of a rank's stages")
        return Work(ranks=step.work(), idle_share=step.simulation.idle_share, notes=notes)

    def _pipeline_step(self, plan: ParallelPlan, pipeline: PipelinePlan, options: PipelineOptions) -> PipelineStep:
        batch, custom = self.described.batch, custom_orders(options)
        sizes = microbatch_sizes(pipeline, batch_rows(batch), is_custom=options.is_custom)
        parts = split_batch(batch, sizes)
        outputs = [self._outputs(plan.precision, part) for part in parts]
        largest = sizes.index(max(sizes))
        flow = self._flow(plan.precision)

        def splits(stage: StagePlan) -> bool:
            """As the runner decides."""
            reaches = all(o[block].leaves[leaf].requires_grad for o in outputs for block, leaf in stage.receives)
            return not plan.recompute.blocks and reaches and splits_well(flow, stage)

        def runs(recompute: RecomputePlan) -> dict[int, StageRun]:
            return {
                stage.index: self._stage_run(plan, parts[largest], stage, outputs[largest], recompute)
                for stage in pipeline.stages
            }

        return PipelineStep(
            plan=pipeline,
            orders=training_orders(pipeline, custom, len(sizes)),
            sizes=sizes,
            outputs=outputs,
            runs=runs(plan.recompute),
            plain_runs=runs(NO_RECOMPUTATION),
            whole_backward=frozenset(s.index for s in pipeline.stages if not splits(s)),
        )

    def _outputs(self, precision: PrecisionPlan, part: Any) -> Mapping[int, Outputs]:
        blocks = [block.name for block in self.described.profile.called_blocks()]
        step = Step("training_step", part, (0,), is_transferred=False)
        key = ("outputs", precision.gather_dtype, batch_rows(part))
        return self._once(key, lambda: self._skeleton(precision).outputs(blocks, step))

    def _stage_run(
        self,
        plan: ParallelPlan,
        part: Any,
        stage: StagePlan | None,
        outputs: Mapping[int, Outputs],
        recompute: RecomputePlan,
    ) -> StageRun:
        d = self.described
        gather = None if plan.precision.gather_dtype is None else dtype_from_word(plan.precision.gather_dtype)
        # One object per size and options, kept here.
        key = (
            "run",
            id(plan.tensor),
            gather,
            recompute.mode,
            recompute.ops,
            self._likeness(stage, part, outputs, recompute),
        )

        def run() -> StageRun:
            given = StepToRun(
                module=d.module,
                batch=part,
                entry=d.entry,
                plan=plan,
                profile=d.profile,
                recompute=recompute,
                gather_dtype=gather,
                autocast_dtype=d.autocast_dtype,
                device=d.device,
                stage=stage,
                outputs=outputs,
            )
            try:
                return run_step(given)
            except Exception as error:
                raise _not_on_shares(d.module, d.entry, error) from error

        return self._once(key, run)

    def _likeness(
        self, stage: StagePlan | None, part: Any, outputs: Mapping[int, Outputs], recompute: RecomputePlan
    ) -> Any:
        """Returns what stages have in common that do the same."""
        if stage is None:
            return recompute.blocks
        blocks = self.described.profile.called_blocks()
        own = blocks[stage.first : stage.stop]
        inside = tuple(f"{block.name}." for block in own)
        last = stage.stop == len(blocks)
        values = [[outputs[b].leaves[i] for b, i in which] for which in (stage.receives, stage.sends)]
        return (
            stage.first == 0,
            last,
            batch_rows(part),
            tuple((block.class_name, block.cost, block.name in recompute.blocks) for block in own),
            tuple(tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves) for leaves in values),
            tuple(name for name in stage.parameters if not name.startswith(inside)),
        )

    def _notes(self, plan: ParallelPlan) -> Sequence[str]:
        if plan.tensor is None:
            return ()
        lengths = {tuple(layout.local_length(r) for r in range(plan.tensor.size)) for layout in plan.tensor.layouts}
        if all(len(set(each)) == 1 for each in lengths):
            return ()
        return ("uneven shares on the tensor axis: activations, exchanges and FLOPs are the first rank's, the most",)

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _not_on_shares(module: nn.Module, entry: str, error: Exception) -> ValueError:
    what = (str(error).strip().splitlines() or [""])[0]
    return ValueError(
        message(
            "What ranks do is found by running one rank's step on fake tensors, which must run to its end.",
            got=f"{type(error).__name__}: {what}",
            source=f"{type(module).__name__}.{entry}, at {blame(error)}",
            change="mend the line that is named, or leave the tensor and pipeline sizes at 1",
        )
    )
