"""torch's pipeline schedules as plain orders of actions, without any process group (torch 2.11 to 2.13).

The private name is ``_Action``, one cell of a schedule's table: torch has no public view on those.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action

from lightning_pardist.specs.pipeline_plan import Action, Orders

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_V_SHAPED = ("zbv_zero_bubble", "dualpipev")


class _OnPaper:
    """What a schedule's constructor asks of a stage."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod = nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """Returns the place along the pipeline axis of a stage: round and round, or down and up for the V-shaped ones."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if schedule in _V_SHAPED and turn % 2 else place


def orders_of(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> Orders:
    """Returns what every rank computes, in order.

    Raises:
        ValueError: if the schedule cannot run this number of micro-batches; the text is torch's.
    """
    if schedule == "1f1b":
        if microbatches < ranks:
            raise ValueError(f"1F1B needs at least as many micro-batches as stages, {microbatches} < {ranks}")
        # torch's own table numbers the last stage's forwards from 1 (2.13); this is what its 1F1B runs.
        return {rank: _one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    if schedule == "gpipe":
        kinds = ((kind, m) for kind in "FB" for m in range(microbatches))
        listed = tuple(kinds)
        return {rank: tuple((rank, kind, m) for kind, m in listed) for rank in range(ranks)}
    stages = [_OnPaper(0, 0, ranks, ranks * stages_per_rank) for _ in range(stages_per_rank)]
    made = SCHEDULES[schedule](stages, microbatches)
    return {rank: tuple(_plain(actions)) for rank, actions in made.pipeline_order.items()}


def orders_from_file(path: str) -> Orders:
    """Returns a custom schedule: one row per rank, one action per cell, as torch writes and reads it.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if a cell is no action.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    try:
        actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return {rank: tuple(_plain(row)) for rank, row in actions.items()}


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    warmup = min(microbatches, ranks - rank)
    found: list[Action] = [(rank, "F", m) for m in range(warmup)]
    for m in range(microbatches):
        found.append((rank, "B", m))
        if warmup + m < microbatches:
            found.append((rank, "F", warmup + m))
    return tuple(found)


def _plain(actions: Sequence[Any]) -> list[Action]:
    found: list[Action] = []
    for action in actions:
        if action is None:
            continue
        for part in action.sub_actions or (action,):
            kind = str(part.computation_type.value)
            if kind in ("F", "B", "I", "W"):
                overlaps = kind == "F" and action.sub_actions is not None
                found.append((int(part.stage_index), "O" if overlaps else kind, int(part.microbatch_index)))
    return found
