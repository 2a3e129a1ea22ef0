"""What the user may choose about pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_pardist.base.errors import message

ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"
]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
SINGLE_STAGE = frozenset({"gpipe", "1f1b"})
"""Schedules with one stage per rank."""
V_SHAPED = frozenset({"zbv_zero_bubble", "dualpipev"})
"""Schedules with two stages per rank that run down the ranks and up again: the loss is on the first rank."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How the block stack is cut into stages and in which order they run.

    Raises:
        ValueError: for values that no model could be run with.
    """

    split: Literal["auto"] | Sequence[int] | Sequence[str] = "auto"
    """``"auto"`` balances the cost of forward and backward; else the number of blocks of every stage, or the names of
    the blocks with which the second and every later stage begins."""
    schedule: str = "1f1b"
    """``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``looped_bfs``, ``interleaved_zero_bubble``, ``zbv_zero_bubble``,
    ``dualpipev``, or the path of a ``.csv`` file with one row of actions (``0F0``, ``1B3``, ...) per rank."""
    stages_per_rank: int | None = None
    """None: one, or two for the schedules that want several."""
    num_microbatches: int | Literal["auto"] = "auto"
    """Parts that a rank's batch is cut into. ``"auto"``: as many as keep the foretold idle share under
    ``most_idle``, and no more than the batch has rows. A step that needs the whole batch at once takes 1."""
    most_idle: float = 0.15
    """Share of a step that ranks may wait, for ``num_microbatches="auto"``."""
    loss_weight: Literal["rows", "tokens"] = "rows"
    """What the losses of micro-batches are weighted by: rows (right for means over samples), or the labels that count
    (right for means over tokens, where some are ignored)."""
    labels: str = "labels"
    """For ``loss_weight="tokens"``: the path of the labels in the batch (``"labels"``, ``"1"``, ``"text.labels"``)."""
    ignore_index: int = -100
    """For ``loss_weight="tokens"``: the label that does not count."""
    shifted_labels: bool = False
    """For ``loss_weight="tokens"``: the model shifts the labels itself, so the first of each row does not count."""
    timeline: str | None = None
    """A file to which the measured timeline of one training step is written: a page (``.html``) or a Chrome trace
    (``.json``)."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES and not self.is_custom:
            raise _wrong("schedule", f"one of {', '.join(SCHEDULES)}, or the path of a .csv file", self.schedule)
        if self.num_microbatches != "auto" and not _is_count(self.num_microbatches):
            raise _wrong("num_microbatches", "a positive integer or 'auto'", self.num_microbatches)
        if self.stages_per_rank is not None and not _is_count(self.stages_per_rank):
            raise _wrong("stages_per_rank", "a positive integer or None", self.stages_per_rank)
        if not 0 < self.most_idle < 1:
            raise _wrong("most_idle", "a share between 0 and 1", self.most_idle)
        if self.loss_weight not in ("rows", "tokens"):
            raise _wrong("loss_weight", "'rows' or 'tokens'", self.loss_weight)
        if self.timeline is not None and not str(self.timeline).endswith((".html", ".json")):
            raise _wrong("timeline", "the path of an .html or .json file", self.timeline)
        self._check_split()
        self._check_stages_per_rank()

    @property
    def is_custom(self) -> bool:
        """True if the schedule is read from a file."""
        return str(self.schedule).endswith(".csv")

    @property
    def virtual_stages(self) -> int:
        """Stages on every rank."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 1 if self.schedule in SINGLE_STAGE or self.is_custom else 2

    def _check_split(self) -> None:
        split: object = self.split
        if split == "auto":
            return
        entries = list(split) if isinstance(split, (list, tuple)) else None
        if entries and (all(_is_count(e) for e in entries) or all(isinstance(e, str) for e in entries)):
            return
        raise _wrong("split", "'auto', a list of block counts or a list of block names", split)

    def _check_stages_per_rank(self) -> None:
        stages = self.stages_per_rank
        if stages is None or self.is_custom:
            return
        if self.schedule in SINGLE_STAGE and stages != 1:
            raise _wrong("stages_per_rank", f"1 for the schedule {self.schedule}", stages)
        if self.schedule in V_SHAPED and stages != 2:
            raise _wrong("stages_per_rank", f"2 for the schedule {self.schedule}", stages)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _wrong(field: str, words: str, value: object) -> ValueError:
    return ValueError(
        message(
            f"PipelineOptions.{field} must be {words}.",
            got=f"{field}={value!r}",
            source="the strategy's argument pipeline",
            change=f"set {field} to {words}",
        )
    )
