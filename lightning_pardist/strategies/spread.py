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
from lightning_pardist.describe import module_tree_profile, profile_model
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel, recall
from lightning_pardist.plan import PlanInput, format_plan, largest_state, make_plan, state_bytes
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.optimizers import state_bytes_per_element
from lightning_pardist.strategies.pipeline_staging import Staging
from lightning_pardist.strategies.precision import precision_plan
from lightning_pardist.strategies.sample import Sample, find_sample

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
    loaders: lightning_api.TrainLoaders | None
    """None outside fit."""
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
    sample = stages.sample_or_evaluated(sample)
    profile = _describe(module, sample, request)
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
            training=training,
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
                model.profile, plan.pipeline, shard_size, per_element, whole=plan.data_parallel.ignored_parameters
            ),
            state_one_process=state_bytes(model.profile, 1, per_element),
        )
        model.plan = plan
    print(format_plan(plan), flush=True)


def _describe(module: LightningModule, sample: Sample | None, request: SpreadRequest) -> ModelProfile:
    """Rank 0 describes for all: one fake run, one plan."""
    found: ModelProfile | Exception | None = None
    if request.meshes is None or torch.distributed.get_rank() == 0:
        try:
            found = _profile(module, sample, request)
        except Exception as error:  # every rank must hear of it
            found = error
    first = gather_objects(found, request.meshes)[0]
    if isinstance(first, Exception):
        raise first
    assert first is not None
    return first


def _profile(module: LightningModule, sample: Sample | None, request: SpreadRequest) -> ModelProfile:
    if sample is None:
        return module_tree_profile(module, "there was no sample batch")
    batch = request.precision.convert_input(sample.batch)
    autocast = torch.bfloat16 if str(request.precision.precision) == "bf16-mixed" else None
    with lightning_api.transfer_hooks_of_data_module(module):
        return profile_model(module, batch, entry=sample.entry, autocast_dtype=autocast, device=request.device)


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
    if training and not any(p.requires_grad for p in earlier.module.parameters()):
        raise ValueError(
            message(
                "Training needs at least one parameter with requires_grad=True.",
                got="all parameters are frozen",
                source="the LightningModule after configure_model and the callbacks' setup",
                change="unfreeze what should train, or call validate, test or predict instead of fit",
            )
        )
