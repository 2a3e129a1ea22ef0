"""describe -> plan -> apply, with what Lightning knows: trainer, precision, layer sync."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_pardist.apply import apply_plan, check_modules, convert_batch_norms
from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.base.recomputing import resolve_ops
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.describe import module_tree_profile, profile_model
from lightning_pardist.describe.levers import Conditions, profile_under
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel, recall
from lightning_pardist.plan import (
    PlanInput,
    format_plan,
    largest_state,
    make_plan,
    plan_recompute,
    profile_on_tensor_axis,
    state_bytes,
    with_costs,
)
from lightning_pardist.run.agree import on_first_rank
from lightning_pardist.specs.block_levers import CompileOptions, RecomputeOptions, RecomputePlan
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.strategies import lightning_data_api
from lightning_pardist.strategies.optimizers import state_bytes_per_element
from lightning_pardist.strategies.pipeline_staging import Staging
from lightning_pardist.strategies.precision import precision_plan
from lightning_pardist.strategies.sample import Sample, find_sample, sample_or_evaluated
from lightning_pardist.strategies.tensor_planning import TensorSetup, plan_tensor_axis

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SpreadRequest:
    """What a strategy asks for."""

    config: ParallelConfig
    meshes: Meshes | None
    device: torch.device
    precision: Precision
    layer_sync: bool
    sample_batch: Any
    loaders: lightning_data_api.TrainLoaders | None
    """None outside fit."""
    tensor: TensorOptions
    recompute: RecomputeOptions | None = None
    compile: CompileOptions | None = None
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)

    @property
    def sizes(self) -> AxisSizes:
        """Sizes of the live mesh."""
        return AxisSizes() if self.meshes is None else self.meshes.sizes


def spread(module: LightningModule, request: SpreadRequest) -> ParallelModel:
    """Describes the module, plans, and applies the plan; every rank must call it.

    A module that an earlier entry into a Trainer has spread the same way comes back as it is.

    Raises:
        ValueError: on all ranks, if the module cannot be spread as asked, or was spread otherwise before.
    """
    training = request.loaders is not None
    earlier = recall(module)
    if earlier is not None:
        _check_reuse(earlier, request, training=training)
        return earlier
    check_modules(module, request.meshes)
    module = request.precision.convert_module(module)  # type: ignore[assignment]  # in place, for all of ours
    stages = Staging(module, request.pipeline, request.meshes, request.device, request.precision)
    sample = find_sample(module, request.loaders, request.sample_batch)
    if request.sizes.tensor_parallel > 1 or request.sizes.pipeline_parallel > 1:
        sample = sample_or_evaluated(module, sample)
    profile, recompute = on_first_rank(lambda: _describe(module, sample, request), request.meshes)
    tensor = _plan_tensor_axis(module, profile, sample, request) if request.sizes.tensor_parallel > 1 else None
    stages.describe(profile, sample)
    if request.layer_sync and request.meshes is not None:
        # After describing: the fake run knows no process groups. Names and parameters stay the same.
        convert_batch_norms(module, request.meshes)
    sharded = request.sizes.data_parallel_shard > 1
    table = module_table(module, profile.called_modules)
    plan = make_plan(
        PlanInput(
            table=table,
            profile=profile,
            config=request.config,
            sizes=request.sizes,
            precision=precision_plan(request.precision, sharded=sharded),
            recompute=recompute,
            compile=request.compile,
            training=training,
            tensor=tensor,
        ),
        pipeline=stages.plan(table, profile),
    )
    model = apply_plan(module, plan, request.meshes, request.device)
    model.profile = profile
    stages.remember()
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(request.device)
    return model


def announce(model: ParallelModel, optimizers: list[Optimizer]) -> None:
    """Prints the plan, now that the optimizers tell what their state will take."""
    per_element = state_bytes_per_element(optimizers)
    plan = model.plan
    if per_element is not None and model.profile is not None:
        shard_size = plan.sizes.data_parallel_shard if model.kind == "shard" else 1
        plan = replace(
            plan,
            state_per_rank=largest_state(
                profile_on_tensor_axis(model.profile, plan.tensor),
                plan.pipeline,
                shard_size,
                per_element,
                whole=plan.data_parallel.ignored_parameters,
            ),
            state_one_process=state_bytes(model.profile, 1, per_element),
        )
        model.plan = plan
    print(format_plan(plan), flush=True)


def _plan_tensor_axis(
    module: LightningModule, profile: ModelProfile, sample: Sample | None, request: SpreadRequest
) -> TensorPlan:
    assert request.meshes is not None
    return plan_tensor_axis(
        TensorSetup(
            module=module,
            profile=profile,
            sample=sample,
            options=request.tensor,
            precision=request.precision,
            meshes=request.meshes,
            device=request.device,
        )
    )


def _describe(
    module: LightningModule, sample: Sample | None, request: SpreadRequest
) -> tuple[ModelProfile, RecomputePlan]:
    profile = _profile(module, sample, request)
    return profile, _recompute(module, sample, request, profile)


def _profile(module: LightningModule, sample: Sample | None, request: SpreadRequest) -> ModelProfile:
    if sample is None:
        return module_tree_profile(module, "there was no sample batch")
    batch = request.precision.convert_input(sample.batch)
    with lightning_data_api.transfer_hooks_of_data_module(module):
        return profile_model(
            module, batch, entry=sample.entry, autocast_dtype=_autocast(request), device=request.device
        )


def _recompute(
    module: LightningModule, sample: Sample | None, request: SpreadRequest, profile: ModelProfile
) -> RecomputePlan:
    plan = plan_recompute(profile, request.recompute)
    if not plan.blocks or sample is None or profile.source != "fake_run":
        return plan
    assert request.recompute is not None
    precision = precision_plan(request.precision, sharded=request.sizes.data_parallel_shard > 1)
    names = request.recompute.ops or plan.ops
    conditions = Conditions(
        kept=resolve_ops(names if plan.mode == "selective" else ()),
        gather_dtype=None if precision.gather_dtype is None else dtype_from_word(precision.gather_dtype),
        cast_inputs_of=[block.name for block in profile.blocks()],
        autocast_dtype=_autocast(request),
        device=request.device,
    )
    batch = request.precision.convert_input(sample.batch)
    with lightning_data_api.transfer_hooks_of_data_module(module):
        before = profile
        if conditions.gather_dtype is not None:
            before, _ = profile_under(module, batch, conditions, entry=sample.entry)
        after, hits = profile_under(
            module, batch, replace(conditions, recomputed=plan.blocks), entry=sample.entry
        )  # fmt: skip
    return with_costs(plan, request.recompute, before=before, after=after, hits=hits)


def _autocast(request: SpreadRequest) -> torch.dtype | None:
    return torch.bfloat16 if str(request.precision.precision) == "bf16-mixed" else None


def _check_reuse(earlier: ParallelModel, request: SpreadRequest, *, training: bool) -> None:
    plan = earlier.plan
    wanted = (request.sizes, request.config.zero_stage if request.sizes.data_parallel_shard > 1 else 0)
    if (plan.sizes, plan.data_parallel.zero_stage) != wanted:
        raise ValueError(
            message(
                "A module keeps the layout it was first spread with.",
                got=f"{plan.sizes} with zero_stage={plan.data_parallel.zero_stage}, now {wanted[0]} with {wanted[1]}",
                source="this Trainer's strategy, and the one that used the module before",
                change="build the module anew and load a checkpoint into it",
            )
        )
    if training:
        _check_same_levers(earlier, request)
    if training and not any(p.requires_grad for p in earlier.module.parameters()):
        raise ValueError(
            message(
                "Training needs at least one parameter with requires_grad=True.",
                got="all parameters are frozen",
                source="the LightningModule after configure_model and the callbacks' setup",
                change="unfreeze what should train, or call validate, test or predict instead of fit",
            )
        )


def _check_same_levers(earlier: ParallelModel, request: SpreadRequest) -> None:
    assert earlier.profile is not None
    asked = plan_recompute(earlier.profile, request.recompute)
    has = earlier.plan.recompute
    compiled = earlier.plan.compile.options if earlier.plan.compile.blocks else None
    if (has.mode, has.blocks, has.ops) != (asked.mode, asked.blocks, asked.ops) or compiled != request.compile:
        raise ValueError(
            message(
                "A module keeps the recomputation and the compilation it was first spread with.",
                got=f"{len(has.blocks)} block(s) recomputed ({has.mode}), compile={compiled}; now {len(asked.blocks)} "
                f"({asked.mode}), compile={request.compile}",
                source="this Trainer's strategy, and the one that used the module before",
                change="build the module anew and load a checkpoint into it",
            )
        )
