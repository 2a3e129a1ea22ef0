"""Schedules as the planner wants them: torch's, or one of a file."""

from __future__ import annotations

from lightning_pardist import torch_schedules_api as api
from lightning_pardist.base.errors import message
from lightning_pardist.plan.pipeline_input import ScheduleTable
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import Orders


def schedule_table(options: PipelineOptions) -> ScheduleTable:
    """Returns the planner's view of schedules."""
    return ScheduleTable(orders=api.orders_of, rank_of_stage=api.rank_of_stage, custom=custom_orders(options))


def custom_orders(options: PipelineOptions) -> Orders | None:
    """Returns the schedule of a file, None for one with a name.

    Raises:
        ValueError: if the file cannot be read as a schedule.
    """
    if not options.is_custom:
        return None
    try:
        return api.orders_from_file(options.schedule)
    except (OSError, ValueError) as error:
        raise ValueError(
            message(
                "A schedule file has one row per rank of the pipeline, with actions such as 0F0, 0B0, 1I2, 1W2.",
                got=str(error),
                source=options.schedule,
                change="write it as torch's schedules do, or use one of the named schedules",
            )
        ) from error
