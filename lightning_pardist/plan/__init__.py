"""STEP 2: profile and config become a plan. Pure: no process group, no device, no module."""

from __future__ import annotations

from dataclasses import replace

from lightning_pardist.base import axes
from lightning_pardist.plan.block_levers import plan_compile, plan_recompute, with_costs
from lightning_pardist.plan.costs import state_bytes, step_traffic
from lightning_pardist.plan.data_parallel import PlanInput, plan_data_parallel
from lightning_pardist.plan.pipeline_report import fullest_pipeline_rank, largest_state
from lightning_pardist.plan.rank_view import RankViews
from lightning_pardist.plan.report import format_plan
from lightning_pardist.plan.sequence_parallel import with_sequence_parallel
from lightning_pardist.plan.tensor_costs import profile_on_tensor_axis, tensor_traffic
from lightning_pardist.plan.tensor_parallel import make_tensor_plan
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import ParallelPlan, Traffic
from lightning_pardist.specs.pipeline_plan import PipelinePlan

__all__ = [
    "PlanInput",
    "format_plan",
    "largest_state",
    "make_plan",
    "make_tensor_plan",
    "plan_recompute",
    "profile_on_tensor_axis",
    "state_bytes",
    "with_costs",
    "with_sequence_parallel",
]


def make_plan(
    given: PlanInput, *, pipeline: PipelinePlan | None = None, optimizer_bytes_per_element: float | None = None
) -> ParallelPlan:
    """Returns the whole plan for a module on a mesh.

    Args:
        given: the module's tree and profile, the user's config, the mesh sizes and the precision.
        pipeline: how the module is cut into stages, if it is.
        optimizer_bytes_per_element: optimizer state per trainable element, for the report; None if unknown.

    Raises:
        ValueError: if the module cannot be spread as asked.
    """
    data_parallel = plan_data_parallel(given)
    held = profile_on_tensor_axis(given.profile, given.tensor)
    shard_size = given.sizes.data_parallel_shard if data_parallel.kind == "shard" else 1
    plan = ParallelPlan(
        module_class=given.profile.module_class,
        sizes=given.sizes,
        precision=given.precision,
        data_parallel=data_parallel,
        state_per_rank=largest_state(
            held, pipeline, shard_size, optimizer_bytes_per_element, whole=data_parallel.ignored_parameters
        ),
        state_one_process=state_bytes(given.profile, 1, optimizer_bytes_per_element),
        traffic=(),
        tensor=given.tensor,
        pipeline=pipeline,
        recompute=given.recompute,
        compile=plan_compile(given.profile, given.compile, data_parallel.units),
    )
    return replace(plan, traffic=_traffic(plan, given.profile, held))


def _traffic(plan: ParallelPlan, profile: ModelProfile, held: ModelProfile) -> tuple[Traffic, ...]:
    """Returns the collectives of the first rank of the pipeline rank that holds most, but for what crosses its cuts."""
    place = {**dict.fromkeys(axes.AXES, 0), axes.PIPELINE_PARALLEL: fullest_pipeline_rank(held, plan.pipeline)}
    view = RankViews(plan=plan, profile=profile).at(place)
    return (
        *step_traffic(view.profile, view.data_parallel, plan.sizes, plan.precision),
        *tensor_traffic(profile, view),
    )
