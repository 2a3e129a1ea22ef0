"""Policies of the parallelisms that have their place on the mesh but are not in this version yet.

They are part of the strategy's signature so that configurations need not change their form later. Until a parallelism
is there, giving its options is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_pardist.base.errors import message


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """How the matrices inside a block are shared."""

    plan: Mapping[str, str] | None = None
    """Module name pattern -> style (``column``, ``row``, ...); None derives the plan from the module's own code."""
    verify: Literal["probe", "off", "full"] = "probe"
    """Compare a sharded block with the whole one before training."""
    sequence_parallel: bool = False
    """Keep what lies between the shared matrices sharded over the sequence."""


def refuse_options(**options: TensorOptions | None) -> None:
    """Refuses options of parallelisms that this version does not have.

    Raises:
        ValueError: if any is given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            message(
                "This version has no such axis yet, so its options have nothing to act on.",
                got=", ".join(f"{name}={type(options[name]).__name__}(...)" for name in given),
                source="the strategy's arguments",
                change="leave these options out",
            )
        )
