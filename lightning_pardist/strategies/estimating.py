"""``estimate``: what a module will take in a layout, without devices, weights or process groups."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule

from lightning_pardist.base.errors import message
from lightning_pardist.base.recomputing import resolve_ops
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.describe import profile_model
from lightning_pardist.describe.levers import Conditions, profile_under
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.plan import PlanInput, make_plan, plan_recompute, with_costs
from lightning_pardist.plan.estimate import Cluster, make_estimate
from lightning_pardist.plan.layouts import FILL, candidate_layouts, judge, rank, too_large
from lightning_pardist.plan.memory import Held
from lightning_pardist.specs.block_levers import RecomputeOptions, RecomputePlan
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.device import Device, parse_device
from lightning_pardist.specs.estimate import Candidate, Estimate, RankWork
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.options import refuse_idle_options
from lightning_pardist.specs.parallel_plan import ParallelPlan, PrecisionPlan
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.strategies.estimate_axes import Described, ModelAxes, Work
from lightning_pardist.strategies.refusals import check_pipeline, refuse_under_pipeline

Entry = Literal["training_step", "forward"]
PRECISIONS = ("32-true", "64-true", "16-true", "bf16-true", "bf16-mixed")


@dataclass(frozen=True)
class _Asked:
    """A layout to estimate."""

    config: ParallelConfig
    cluster: Cluster
    recompute: RecomputeOptions | None = None
    tensor: TensorOptions | None = None
    pipeline: PipelineOptions | None = None

    @property
    def stages(self) -> PipelineOptions:
        """How the stack is cut."""
        return self.pipeline or PipelineOptions()


class Estimator:
    """Estimates of one module and batch for many layouts; what they share is found out once.

    Args:
        module: the module, on any device, meta included. It stays as it is.
        batch: one rank's batch.
        precision: Lightning's word. Of the ``-true`` ones, the module must have its parameters in that dtype already.
        optimizer_bytes_per_element: state per trained element; 8 is Adam's in fp32, None says that it is unknown.
        accumulate_grad_batches: as the Trainer's.
        entry: what to run.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        batch: Any,
        *,
        precision: str = "32-true",
        optimizer_bytes_per_element: float | None = 8.0,
        accumulate_grad_batches: int = 1,
        entry: Entry = "training_step",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(
                message(
                    f"An estimate is made for the precisions {', '.join(PRECISIONS)}.",
                    got=f"precision={precision!r}",
                    source="the argument precision, or Trainer(precision=...)",
                    change="use one of these words",
                )
            )
        self._module, self._batch, self._entry = module, batch, entry
        self._precision = precision
        self._optimizer_bytes = optimizer_bytes_per_element
        self._accumulates = accumulate_grad_batches > 1
        self._autocast = torch.bfloat16 if precision == "bf16-mixed" else None
        self._cpu = torch.device("cpu")
        self.profile = profile_model(module, batch, entry=entry, autocast_dtype=self._autocast, device=self._cpu)
        self._table = module_table(module, self.profile.called_modules)
        self._axes = ModelAxes(
            Described(
                module=module,
                batch=batch,
                entry=entry,
                profile=self.profile,
                table=self._table,
                precision=self._precision_plan(sharded=False),
                device=self._cpu,
            )
        )
        self._profiles: dict[tuple[bool, RecomputePlan | None], tuple[ModelProfile, frozenset[str]]] = {}

    def estimate(
        self,
        config: ParallelConfig,
        cluster: Cluster,
        recompute: RecomputeOptions | None = None,
        *,
        tensor: TensorOptions | None = None,
        pipeline: PipelineOptions | None = None,
    ) -> Estimate:
        """Returns what one layout takes.

        Raises:
            ValueError: if the sizes do not fit the world, or the module cannot be spread so.
        """
        asked = _Asked(config, cluster, recompute, tensor, pipeline)
        plan = self._plan(asked)
        return self._joined(plan, self._work(plan, asked.stages), cluster)

    def plan(self, config: ParallelConfig, cluster: Cluster) -> ParallelPlan:
        """Returns the plan of one layout alone, without what a step takes.

        Raises:
            ValueError: as ``estimate``.
        """
        return self._plan(_Asked(config, cluster))

    def _plan(self, asked: _Asked) -> ParallelPlan:
        config, cluster = asked.config, asked.cluster
        sizes = config.resolve(world_size=cluster.world_size, num_nodes=cluster.num_nodes)
        self._check(sizes, asked)
        sharded = sizes.data_parallel_shard > 1
        precision = self._precision_plan(sharded=sharded)
        tensor = pipeline = None
        if sizes.tensor_parallel > 1:
            tensor = self._axes.tensor_plan(sizes.tensor_parallel, asked.tensor or TensorOptions())
        if sizes.pipeline_parallel > 1:
            pipeline = self._axes.pipeline_plan(sizes.pipeline_parallel, asked.stages, precision)
        return make_plan(
            PlanInput(
                table=self._table,
                profile=self.profile,
                config=config,
                sizes=sizes,
                precision=precision,
                recompute=self._recompute_plan(asked.recompute, sharded=sharded),
                training=True,
                tensor=tensor,
            ),
            pipeline=pipeline,
            optimizer_bytes_per_element=self._optimizer_bytes,
        )

    def _joined(self, plan: ParallelPlan, work: Work, cluster: Cluster) -> Estimate:
        held = Held(
            plan=plan,
            profile=self.profile,
            optimizer_bytes_per_element=self._optimizer_bytes,
            work=work.ranks,
            idle_share=work.idle_share,
            accumulates=self._accumulates,
        )
        return make_estimate(held, cluster, (*self._assumptions(), *work.notes))

    def _check(self, sizes: AxisSizes, asked: _Asked) -> None:
        """Refuses what the strategy refuses."""
        refuse_idle_options(asked.tensor, name="tensor", size=sizes.tensor_parallel)
        check_pipeline(replace(asked.config, pipeline_parallel_size=sizes.pipeline_parallel), asked.pipeline)
        if isinstance(self._module, LightningModule):
            refuse_under_pipeline(self._module, sizes, asked.config)

    def _work(self, plan: ParallelPlan, stages: PipelineOptions) -> Work:
        if plan.tensor is not None or plan.pipeline is not None:
            return self._axes.work(plan, stages)
        again = plan.recompute.flops_again or 0
        work = RankWork(
            flops_forward=self.profile.flops_forward,
            flops_backward=self.profile.flops_backward + again,
            flops_again=again,
            activation_bytes=self._activations(plan.recompute, sharded=plan.sizes.data_parallel_shard > 1),
        )
        return Work(ranks=(work,), idle_share=0.0)

    def layouts(self, cluster: Cluster, fill: float = FILL) -> list[Candidate]:
        """Returns the layouts of this version, those that fit ``fill`` of a device's memory first, the best ahead."""
        if cluster.device is None:
            raise ValueError(
                message(
                    "Layouts are ranked by what fits on a device.",
                    got="no device",
                    source="the argument device, or --device",
                    change="name the device, such as h100 or memory=80GB",
                )
            )
        found = []
        for words, arguments, recomputed in candidate_layouts(
            cluster, has_blocks=any(True for _ in self.profile.blocks())
        ):
            options = RecomputeOptions() if recomputed else None
            shown = {**arguments, "recompute": "RecomputeOptions()"} if recomputed else arguments
            try:
                estimate = self._tried(_Asked(ParallelConfig(**arguments), cluster, options), fill)
            except ValueError as error:
                reason = " ".join(str(error).split())
                found.append(Candidate(layout=words, arguments=shown, estimate=None, rejected=reason))
                continue
            found.append(judge(words, shown, estimate, fill))
        return rank(found)

    def _tried(self, asked: _Asked, fill: float) -> Estimate:
        """Returns the estimate of a layout; without activations, if what ranks store is too much already."""
        plan = self._plan(asked)
        if plan.tensor is None and plan.pipeline is None:
            return self._joined(plan, self._work(plan, asked.stages), asked.cluster)
        unknown = RankWork(flops_forward=0, flops_backward=0)
        stored = self._joined(plan, Work((unknown,) * plan.sizes.pipeline_parallel, 0.0), asked.cluster)
        if too_large(stored, fill):
            return stored
        return self._joined(plan, self._work(plan, asked.stages), asked.cluster)

    def _precision_plan(self, *, sharded: bool) -> PrecisionPlan:
        if self._precision == "bf16-mixed" and sharded:
            return PrecisionPlan(name=self._precision, gather_dtype="bfloat16", reduce_dtype="float32")
        return PrecisionPlan(name=self._precision)

    def _recompute_plan(self, options: RecomputeOptions | None, *, sharded: bool) -> RecomputePlan:
        plan = plan_recompute(self.profile, options)
        if not plan.blocks or options is None or self.profile.source != "fake_run":
            return plan
        before, _ = self._under(None, options, sharded=sharded)
        after, hits = self._under(plan, options, sharded=sharded)
        return with_costs(plan, options, before=before, after=after, hits=hits)

    def _under(
        self, plan: RecomputePlan | None, options: RecomputeOptions | None, *, sharded: bool
    ) -> tuple[ModelProfile, frozenset[str]]:
        gather = self._precision_plan(sharded=sharded).gather_dtype
        if plan is None and gather is None:
            return self.profile, frozenset()
        key = (gather is not None, plan)
        if key not in self._profiles:
            kept = options.ops or plan.ops if plan is not None and options is not None else ()
            conditions = Conditions(
                recomputed=plan.blocks if plan is not None else (),
                kept=resolve_ops(kept if plan is not None and plan.mode == "selective" else ()),
                gather_dtype=None if gather is None else dtype_from_word(gather),
                cast_inputs_of=[block.name for block in self.profile.blocks()],
                autocast_dtype=self._autocast,
                device=self._cpu,
            )
            self._profiles[key] = profile_under(self._module, self._batch, conditions, entry=self._entry)
        return self._profiles[key]

    def _activations(self, plan: RecomputePlan, *, sharded: bool) -> int | None:
        if self.profile.source != "fake_run":
            return None
        if plan.saved_bytes is not None:
            return plan.saved_bytes
        return self._under(None, None, sharded=sharded)[0].saved_activation_bytes

    def _assumptions(self) -> tuple[str, ...]:
        notes = ["every rank has a batch like the one described; kernels as on the CPU"]
        if self.profile.fallback_reason:
            notes.append(f"activations and FLOPs are unknown: {self.profile.fallback_reason}")
        return (*notes, *self.profile.assumptions)


def estimate(
    module: LightningModule,
    batch: Any,
    *,
    world_size: int,
    num_nodes: int = 1,
    device: str | Device | None = None,
    precision: str = "32-true",
    recompute: RecomputeOptions | None = None,
    optimizer_bytes_per_element: float | None = 8.0,
    tensor: TensorOptions | None = None,
    pipeline: PipelineOptions | None = None,
    **layout: Any,
) -> Estimate:
    """Returns what a run will take per rank and per axis: exact bytes and counts, a roofline if the device is named.

    Args:
        module: the module, on any device, meta included. It stays as it is.
        batch: one rank's batch.
        world_size: ranks.
        num_nodes: nodes they are on.
        device: a name or figures (see ``parse_device``).
        precision: Lightning's word.
        recompute: as the strategy's.
        optimizer_bytes_per_element: state per trained element; 8 is Adam's in fp32.
        tensor: as the strategy's.
        pipeline: as the strategy's.
        **layout: sizes and options of ``ParallelConfig``, as the strategy's.

    Raises:
        ValueError: for a layout that the strategy would refuse, or an unknown device.
    """
    estimator = Estimator(module, batch, precision=precision, optimizer_bytes_per_element=optimizer_bytes_per_element)
    named = parse_device(device) if isinstance(device, str) else device
    cluster = Cluster(world_size=world_size, num_nodes=num_nodes, device=named)
    return estimator.estimate(ParallelConfig(**layout), cluster, recompute, tensor=tensor, pipeline=pipeline)


def config_from(arguments: dict[str, Any]) -> ParallelConfig:
    """Returns the layout among the arguments of a HybridStrategy."""
    names = {field.name for field in fields(ParallelConfig)}
    return ParallelConfig(**{name: value for name, value in arguments.items() if name in names})
