"""Decides into how many micro-batches a batch is cut: enough to keep ranks busy, no more than it has rows."""

from __future__ import annotations

from lightning_pardist.plan.pipeline_input import PipelineInput, refusal
from lightning_pardist.plan.schedule_simulator import Simulation, simulate
from lightning_pardist.specs.pipeline_options import SINGLE_STAGE
from lightning_pardist.specs.pipeline_plan import Orders

_UNKNOWN_ROWS_PER_RANK = 4
"""Micro-batches per rank if nobody knows the size of a batch."""


def plan_microbatches(given: PipelineInput) -> tuple[int, Simulation]:
    """Returns into how many micro-batches a batch is cut, and how the schedule then runs.

    Raises:
        ValueError: if the schedule cannot run the number that was asked for, or batches are too small for it.
    """
    options, schedules = given.options, given.schedules
    rows = given.profile.batch_rows
    if schedules.custom is not None:
        count = 1 + max(micro for actions in schedules.custom.values() for _, _, micro in actions)
        return count, _simulated(given, schedules.custom)
    asked = options.num_microbatches
    if asked != "auto":
        orders = _orders(given, asked)
        if isinstance(orders, str):
            raise refusal(
                "The schedule must be able to run the number of micro-batches.",
                got=f"schedule={options.schedule}, num_microbatches={asked} on {given.ranks} rank(s): {orders}",
                change="use another number, 'auto', or the schedule 'gpipe', which runs any",
            )
        return asked, simulate(orders)
    limit = rows or _UNKNOWN_ROWS_PER_RANK * given.ranks
    best: tuple[int, Simulation] | None = None
    for count in _candidates(limit):
        orders = _orders(given, count)
        if isinstance(orders, str):
            continue
        best = count, simulate(orders)
        if best[1].idle_share <= options.most_idle:
            break
    if best is None:
        raise refusal(
            "A batch must have enough rows for the schedule's micro-batches.",
            got=f"{limit} row(s) per batch, schedule={options.schedule} on {given.ranks} rank(s)",
            source="the data loader's batch size and the strategy's argument pipeline",
            change="use a larger batch, fewer stages, or the schedule 'gpipe', which runs any number",
        )
    return best


def _candidates(limit: int) -> list[int]:
    """Numbers of micro-batches to try, even parts first: uneven ones wait for each other."""
    even = [n for n in range(1, limit + 1) if limit % n == 0]
    return even if len(even) > 2 else list(range(1, limit + 1))


def _orders(given: PipelineInput, count: int) -> Orders | str:
    """Returns the actions of the planned schedule, or in words why it cannot run so many micro-batches."""
    schedule = given.options.schedule
    if schedule in SINGLE_STAGE and count < given.ranks and given.options.num_microbatches != "auto":
        schedule = "gpipe"  # as the run does; the user has asked for it
    try:
        return given.schedules.orders(schedule, given.ranks, given.options.virtual_stages, count)
    except ValueError as error:
        return str(error)


def _simulated(given: PipelineInput, orders: Orders) -> Simulation:
    try:
        return simulate(orders)
    except ValueError as error:
        raise refusal(
            "A schedule must be able to run to its end.",
            got=str(error),
            source=given.options.schedule,
            change="order the actions so that every one's input is computed before it",
        ) from error


def few_microbatches(microbatches: int, ranks: int, idle_share: float) -> str:
    """Says what fewer micro-batches than ranks cost."""
    reason = "the step sees the whole batch at once, and " if microbatches == 1 else ""
    idle = f"ranks wait {100 * idle_share:.0f} % of the time"
    return f"{microbatches} micro-batch(es) for {ranks} pipeline ranks: {reason}{idle}"
