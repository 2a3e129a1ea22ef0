"""A pipeline plan as rows of a table, and what one rank of it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lightning_pardist.plan.costs import state_bytes
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import DataParallelPlan, StateBytes
from lightning_pardist.specs.pipeline_plan import PipelinePlan, StagePlan


def fullest_pipeline_rank(profile: ModelProfile, pipeline: PipelinePlan | None) -> int:
    """Returns the pipeline rank that holds most bytes of parameters; 0 without stages."""
    if pipeline is None:
        return 0
    parts = [pipeline.held_by(rank) for rank in range(pipeline.ranks)]
    sizes = [sum(p.nbytes for p in profile.parameters if p.name in part) for part in parts]
    return sizes.index(max(sizes))


def fullest_rank(profile: ModelProfile, pipeline: PipelinePlan | None) -> ModelProfile:
    """Returns the profile with the parameters of the pipeline rank that holds most bytes of them."""
    if pipeline is None:
        return profile
    fullest = pipeline.held_by(fullest_pipeline_rank(profile, pipeline))
    return replace(profile, parameters=tuple(p for p in profile.parameters if p.name in fullest))


def largest_state(
    profile: ModelProfile,
    pipeline: PipelinePlan | None,
    shard_size: int,
    optimizer_bytes_per_element: float | None,
    *,
    whole: Collection[str] = (),
) -> StateBytes:
    """Returns ``state_bytes`` of the rank that holds most, stages counted."""
    return state_bytes(fullest_rank(profile, pipeline), shard_size, optimizer_bytes_per_element, whole=whole)


def units_of(plan: DataParallelPlan, profile: ModelProfile) -> DataParallelPlan:
    """Returns the sharding units without the parameters that are not in the profile (of another stage)."""
    here = {p.name for p in profile.parameters}
    units = (replace(u, parameters=tuple(n for n in u.parameters if n in here)) for u in plan.units)
    return replace(
        plan,
        units=tuple(unit for unit in units if unit.parameters),
        scalar_parameters=tuple(n for n in plan.scalar_parameters if n in here),
    )


def pipeline_rows(plan: PipelinePlan, bytes_word: Callable[[float], str]) -> list[tuple[str, ...]]:
    """Returns a head row and one row per stage."""
    total = sum(stage.flops for stage in plan.stages) or 1
    rows: list[tuple[str, ...]] = [("stage", "rank", "blocks", "cost", "parameters", "activations", "receives")]
    for stage in plan.stages:
        rows.append(
            (
                str(stage.index),
                str(stage.rank),
                _block_words(stage),
                f"{100 * stage.flops / total:.1f} %",
                bytes_word(stage.parameter_bytes),
                bytes_word(stage.activation_bytes),
                f"{len(stage.receives)} tensor(s)",
            )
        )
    return rows


def pipeline_words(plan: PipelinePlan) -> str:
    """Returns schedule, micro-batches and what is foretold of them, in one line."""
    return (
        f"Pipeline: {plan.schedule}, {plan.num_microbatches} micro-batch(es), idle {100 * plan.idle_share:.1f} %, "
        f"at most {plan.alive:g} alive per rank, dearest stage {plan.balance:.2f} x the mean"
    )


def _block_words(stage: StagePlan) -> str:
    if len(stage.blocks) == 1:
        return stage.blocks[0]
    return f"{stage.blocks[0]} .. {stage.blocks[-1].rsplit('.', 1)[-1]} ({len(stage.blocks)})"
