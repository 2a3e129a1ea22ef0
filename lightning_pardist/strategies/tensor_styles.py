"""torch's parallel styles as values that planning knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from lightning_pardist.base.errors import message
from lightning_pardist.specs.tensor_words import OWNER, Given, Layout, Source, StyleWord

_STYLES = (ColwiseParallel, RowwiseParallel, SequenceParallel)


def without_styles(plan: Mapping[str, Any] | None, source: Source) -> dict[str, Given]:
    """Returns the plan with torch's style objects taken apart.

    Args:
        plan: module name pattern -> word or style.
        source: who gave it.

    Raises:
        ValueError: for anything else, by name.
    """
    return {pattern: _plain(pattern, given, source) for pattern, given in (plan or {}).items()}


def _plain(pattern: str, given: Any, source: Source) -> Given:
    if isinstance(given, str):
        return given
    if type(given) is SequenceParallel:
        dim = given.sequence_sharding[0].dim
        return StyleWord("sequence", f"SequenceParallel(sequence_dim={dim})", dim=dim)
    if type(given) is ColwiseParallel or type(given) is RowwiseParallel:
        into, out = given.input_layouts[0], given.output_layouts[0]
        return StyleWord(
            "column" if type(given) is ColwiseParallel else "row",
            f"{type(given).__name__}(input_layouts={into}, output_layouts={out})",
            into=_layout(into),
            out=_layout(out),
            dim=next((p.dim for p in (into, out) if isinstance(p, Shard) and p.dim >= 0), None),
        )
    raise ValueError(
        message(
            "A tensor-parallel plan gives each pattern a word or one of torch's "
            + ", ".join(style.__name__ for style in _STYLES)
            + "; what other styles do to inputs and outputs, regions do by themselves.",
            got=f"{pattern!r}: {type(given).__name__}",
            source=OWNER[source],
            change="leave the pattern out, or use one of these",
        )
    )


def _layout(placement: Placement) -> Layout:
    if isinstance(placement, Replicate):
        return "whole"
    if type(placement) is Shard:
        return "features" if placement.dim == -1 else "positions" if placement.dim >= 0 else "other"
    return "other"
