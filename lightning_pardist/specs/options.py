"""Refusals of options of the strategy that do not go together."""

from __future__ import annotations

from lightning_pardist.base.errors import message
from lightning_pardist.specs.config import Size


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


def refuse_combinations(*, tensor: Size, pipeline: Size, recompute: object, compile: object) -> None:
    """Refuses what this version has on the data axes only.

    Raises:
        ValueError: for recomputation or compilation with a tensor or a pipeline axis.
    """
    sizes = f"tensor_parallel_size={tensor}, pipeline_parallel_size={pipeline}"
    levers = {name: value for name, value in (("recompute", recompute), ("compile", compile)) if value}
    if levers and (tensor != 1 or pipeline != 1):
        raise ValueError(
            message(
                "In this version the strategy recomputes and compiles blocks on the data axes only.",
                got=", ".join(f"{name}={value!r}" for name, value in levers.items()) + f", {sizes}",
                source="the strategy's arguments",
                change="leave them out; a module that checkpoints its own blocks works with a tensor axis",
            )
        )
