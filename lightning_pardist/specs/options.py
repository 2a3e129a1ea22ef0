"""Policies of the parallelisms that have their place on the mesh but are not in this version yet.

They are part of the strategy's signature so that configurations need not change their form later. Until a parallelism
is there, giving its options is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_pardist.base.errors import message
from lightning_pardist.specs.config import Size


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How the block stack is cut into stages and in which order they run."""

    split: Literal["auto"] | Sequence[int] = "auto"
    """``"auto"`` balances cost; else the number of blocks of every stage."""
    schedule: str = "1f1b"
    """Name of a schedule of ``torch.distributed.pipelining``."""
    num_microbatches: int | Literal["auto"] = "auto"
    """Parts that a rank's batch is cut into."""


def refuse_idle_options(options: object, *, name: str, size: Size) -> None:
    """Refuses options of an axis of one rank.

    Raises:
        ValueError: if any are given.
    """
    if options is not None and size == 1:
        raise ValueError(
            message(
                "Options of an axis with one rank have nothing to act on.",
                got=f"{name}={type(options).__name__}(...), {name}_parallel_size=1",
                source="the strategy's arguments",
                change=f"set {name}_parallel_size, or leave the options out",
            )
        )


def refuse_levers_with_tensor_axis(size: Size, **levers: object) -> None:
    """Refuses recomputation and compilation by the strategy together with a tensor axis.

    Raises:
        ValueError: if any is given.
    """
    given = [name for name, value in levers.items() if value]
    if given and size != 1:
        raise ValueError(
            message(
                "In this version the strategy recomputes and compiles blocks on the data axes only.",
                got=f"{', '.join(f'{name}={levers[name]!r}' for name in given)}, tensor_parallel_size={size}",
                source="the strategy's arguments",
                change="leave them out; a module that checkpoints its own blocks works with a tensor axis",
            )
        )


def refuse_options(**options: PipelineOptions | None) -> None:
    """Refuses options of parallelisms that this version does not have.

    Raises:
        ValueError: if any is given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            message(
                "This version spreads a model over the data and tensor axes; options of others have nothing to act on.",
                got=", ".join(f"{name}={type(options[name]).__name__}(...)" for name in given),
                source="the strategy's arguments",
                change="leave these options out",
            )
        )
