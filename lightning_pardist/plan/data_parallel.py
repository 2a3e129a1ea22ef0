"""Decides how the data axes hold a module: replicated, sharded, or both."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pardist.base.errors import message
from lightning_pardist.plan.units import UnitRequest, ignored_parameters, scalar_parameters, shard_units
from lightning_pardist.specs.block_levers import CompileOptions, RecomputePlan
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.module_table import ModuleTable
from lightning_pardist.specs.parallel_plan import DataParallelPlan, PrecisionPlan, ShardUnit
from lightning_pardist.specs.tensor_plan import TensorPlan


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """All that a plan depends on."""

    table: ModuleTable
    profile: ModelProfile
    config: ParallelConfig
    sizes: AxisSizes
    precision: PrecisionPlan
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    """Made by ``plan_recompute``, with the bytes of a second run where there was one."""
    compile: CompileOptions | None = None
    training: bool
    """False for validate, test and predict: no gradients, so frozen modules are fine."""
    tensor: TensorPlan | None = None
    """What the tensor axis makes of the module; None if that axis has one rank."""


def plan_data_parallel(given: PlanInput) -> DataParallelPlan:
    """Returns the plan of the data axes.

    Raises:
        ValueError: if the module has nothing to train, or its units cannot be formed as asked.
    """
    _check_parameters(given)
    ignored = ignored_parameters(given.table)
    if given.sizes.data_parallel == 1:
        return DataParallelPlan(kind="none", zero_stage=0, ignored_parameters=ignored)
    if given.sizes.data_parallel_shard == 1:
        return _replicate(given, ignored)
    units = shard_units(given.table, given.profile, _request(given))
    _check_dtypes(given.profile, units)
    return DataParallelPlan(
        kind="shard",
        zero_stage=given.config.zero_stage,
        units=units,
        scalar_parameters=tuple(n for n in scalar_parameters(given.profile) if n not in ignored),
        ignored_parameters=ignored,
        find_unused_parameters=_may_be_unused(given, ignored),
        cpu_offload=given.config.cpu_offload,
        notes=(*_notes(given, units), *_unused_notes(given, ignored)),
    )


def _request(given: PlanInput) -> UnitRequest:
    return UnitRequest(
        patterns=given.config.fsdp_units,
        # Stages run many micro-batches: parameters gathered for the first are kept until the step has ended.
        reshard_after_forward=given.config.zero_stage == 3 and given.sizes.pipeline_parallel == 1,
        lower_precision=given.precision.gather_dtype is not None,
    )


def _replicate(given: PlanInput, ignored: tuple[str, ...]) -> DataParallelPlan:
    if given.config.fsdp_units:
        shard_units(given.table, given.profile, _request(given))  # a pattern that matches nothing is an error here too
    return DataParallelPlan(
        kind="replicate",
        zero_stage=0,
        ignored_parameters=ignored,
        find_unused_parameters=_may_be_unused(given, ignored),
        notes=_unused_notes(given, ignored),
    )


def _may_be_unused(given: PlanInput, ignored: tuple[str, ...]) -> bool:
    """When the step could not be observed, ranks have to look for unused parameters; when it could, they need not."""
    return given.profile.source != "fake_run" or bool(set(given.profile.unused_parameters) - set(ignored))


def _unused_notes(given: PlanInput, ignored: tuple[str, ...]) -> tuple[str, ...]:
    unused = [name for name in given.profile.unused_parameters if name not in ignored]
    return (f"parameters without a gradient: {', '.join(unused)}",) if unused else ()


def _notes(given: PlanInput, units: tuple[ShardUnit, ...]) -> tuple[str, ...]:
    notes = []
    if len(units) == 1:
        notes.append("the whole module is one unit: gathered at once, so peak memory holds all parameters")
    held = {name for unit in units if not unit.is_root for name in unit.parameters}
    blocks = {name for block in given.profile.blocks() for name in block.parameter_names}
    if missed := sorted(blocks - held - set(scalar_parameters(given.profile))):
        notes.append(
            f"used outside their block or tied across blocks, so held by the root: {', '.join(missed[:3])} ..."
        )
    return tuple(notes)


def _check_parameters(given: PlanInput) -> None:
    ignored = set(ignored_parameters(given.table))
    parameters = [p for p in given.profile.parameters if p.name not in ignored]
    if not parameters:
        raise ValueError(
            message(
                "A module needs parameters to be spread over ranks.",
                got=f"{given.profile.module_class} has none",
                source="the LightningModule after configure_model",
                change="build its layers in __init__ or configure_model, or train it on one device",
            )
        )
    if given.training and not any(p.requires_grad for p in parameters):
        raise ValueError(
            message(
                "Training needs at least one parameter with requires_grad=True.",
                got=f"all {len(parameters)} parameters of {given.profile.module_class} are frozen",
                source="the LightningModule after configure_model and the callbacks' setup",
                change="unfreeze what should train, or call validate, test or predict instead of fit",
            )
        )


def _check_dtypes(profile: ModelProfile, units: tuple[ShardUnit, ...]) -> None:
    by_name = {p.name: p for p in profile.parameters}
    for unit in units:
        seen = {by_name[name].dtype: name for name in unit.parameters if by_name[name].requires_grad}
        if len(seen) > 1:
            listed = ", ".join(f"{name} ({dtype})" for dtype, name in seen.items())
            raise ValueError(
                message(
                    "Trainable parameters that are sharded together must share one dtype.",
                    got=f"{listed} in the unit of {', '.join(unit.modules) or 'the root'}",
                    source=f"the parameters of {profile.module_class}",
                    change="use one dtype through Trainer(precision=...), or give the odd module a unit of its own",
                )
            )
