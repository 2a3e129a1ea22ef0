"""What a user may give for a pattern of a tensor-parallel plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SEQUENCE = "sequence"
"""The word for modules that work on shares of the sequence."""
Layout = Literal["whole", "features", "positions", "other"]
"""What a rank has of an activation: all, a part of its last dim, a part of its positions, or something else."""
Source = Literal["explicit", "module"]
OWNER: dict[Source, str] = {
    "explicit": "the strategy's `plan`",
    "module": "the module's `tensor_parallel_plan()`",
}


@dataclass(frozen=True)
class StyleWord:
    """A parallel style of torch, taken apart."""

    kind: Literal["column", "row", "sequence"]
    text: str
    """For messages."""
    into: Layout = "whole"
    out: Layout = "whole"
    dim: int | None = None
    """Of the positions, if it says."""


Given = str | StyleWord


@dataclass(frozen=True)
class SequenceWord:
    """The wish that modules work on shares of the sequence."""

    pattern: str
    source: Source
    dim: int | None = None
    """Of the positions, if it is known."""
