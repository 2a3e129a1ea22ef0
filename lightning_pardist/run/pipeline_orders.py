"""What the ranks of a planned pipeline do with a batch of so many rows, in order; no process group is needed."""

from __future__ import annotations

from lightning_pardist.run.microbatches import even_sizes
from lightning_pardist.specs.pipeline_options import SINGLE_STAGE
from lightning_pardist.specs.pipeline_plan import Action, Dataflow, Orders, PipelinePlan, StagePlan
from lightning_pardist.torch_schedules_api import orders_of


def plain_orders(plan: PipelinePlan, microbatches: int) -> Orders:
    """Returns all forwards, then all backwards: runs any number of micro-batches on any placement of stages."""
    orders: dict[int, tuple[Action, ...]] = {}
    for rank in range(plan.ranks):
        own = plan.stages_of(rank)
        forward = ((s.index, "F", m) for s in own for m in range(microbatches))
        backward = ((s.index, "B", m) for s in reversed(own) for m in range(microbatches))
        orders[rank] = (*forward, *backward)
    return orders


def training_orders(plan: PipelinePlan, custom: Orders | None, microbatches: int) -> Orders:
    """Returns what ranks compute in a training step of so many micro-batches, in order."""
    if custom is not None:
        found = {micro for actions in custom.values() for _, _, micro in actions}
        return custom if len(found) == microbatches else plain_orders(plan, microbatches)
    name = usable_schedule(plan, microbatches)
    if name is None:
        return plain_orders(plan, microbatches)
    return orders_of(name, plan.ranks, len(plan.stages) // plan.ranks, microbatches)


def microbatch_sizes(plan: PipelinePlan, rows: int | None, *, is_custom: bool) -> list[int]:
    """Returns the rows of the micro-batches that a batch is cut into.

    Args:
        plan: of the pipeline.
        rows: of the batch, None if they cannot be told.
        is_custom: the schedule is a file's, for one number of micro-batches.
    """
    if rows is None or plan.num_microbatches == 1:
        return [rows or 1]
    count = min(plan.num_microbatches, rows)
    if count < plan.num_microbatches and not is_custom:
        count = next((n for n in range(count, 0, -1) if usable_schedule(plan, n) == plan.schedule), count)
    return even_sizes(rows, count)


def usable_schedule(plan: PipelinePlan, microbatches: int) -> str | None:
    """Returns the plan's schedule if it can run so many micro-batches, else one that can; None for the plain order."""
    per_rank = len(plan.stages) // plan.ranks
    try:
        orders_of(plan.schedule, plan.ranks, per_rank, microbatches)
    except ValueError:
        if plan.schedule in SINGLE_STAGE:
            return "gpipe"
        return None
    return plan.schedule


def splits_well(flow: Dataflow, stage: StagePlan) -> bool:
    """Returns True if a stage's backward pass can be done for inputs first and for weights later.

    torch splits it along one path from one input, which needs a gradient, to one output. Where several tensors cross a
    cut, or code that has weights runs before the stage's first block once more, graphs of weights overlap, and torch
    would walk them twice.
    """
    received, sent = flow.crossing(stage.first) if stage.first else (), flow.crossing(stage.stop)
    repeats = stage.first > 0 and any(
        flow.needs[target].parameters for target in range(stage.first, min(stage.stop, len(flow.blocks)))
    )
    is_last = stage.stop == len(flow.blocks)
    # Code after the last block that needs what comes before the first one (a skip) has that run once more, too.
    skips = is_last and stage.first > 0 and not set(flow.needs[0].parameters).isdisjoint(flow.needs[-1].parameters)
    return len(received) <= 1 and len(sent) <= 1 and not repeats and not skips
