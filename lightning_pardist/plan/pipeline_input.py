"""What a pipeline plan is made from, and how it says no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_pardist.base.errors import message
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.module_table import ModuleTable
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import Dataflow, Orders


@dataclass(frozen=True, kw_only=True)
class ScheduleTable:
    """What the planner must know of schedules, which live with the process groups."""

    orders: Callable[[str, int, int, int], Orders]
    """Given a schedule's name, ranks, stages per rank and micro-batches; raises ValueError if it cannot run them."""
    rank_of_stage: Callable[[str, int, int], int]
    """Given a schedule's name, a stage and the number of ranks."""
    custom: Orders | None = None
    """The schedule of a file."""


@dataclass(frozen=True, kw_only=True)
class PipelineInput:
    """All that a pipeline plan depends on."""

    table: ModuleTable
    profile: ModelProfile
    dataflow: Dataflow
    options: PipelineOptions
    ranks: int
    schedules: ScheduleTable


def refusal(rule: str, *, got: str, change: str, source: str = "the module's step, run on fake tensors") -> ValueError:
    """Returns an error in four parts."""
    return ValueError(message(rule, got=got, source=source, change=change))
