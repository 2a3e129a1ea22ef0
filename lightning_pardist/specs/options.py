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


def refuse_compile_on_shares(*, tensor: Size, compile: object) -> None:
    """Refuses compiled blocks on a tensor axis.

    There every call of a torch function is looked at, to know by identity which tensors are shares of a matrix; a
    compiler that traces the block would trace that code, and compile the answer of one moment.

    Raises:
        ValueError: for both together.
    """
    if compile and tensor != 1:
        raise ValueError(
            message(
                "In this version blocks on a tensor axis run eagerly: what a rank's share needs is found at its calls.",
                got=f"compile={compile!r}, tensor_parallel_size={tensor!r}",
                source="the strategy's arguments",
                change="leave compile out, or use the data and pipeline axes only",
            )
        )
