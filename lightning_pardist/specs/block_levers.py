"""What is done to whole blocks besides spreading them: recomputed activations and compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_pardist.base.errors import message

RecomputeMode = Literal["full", "selective", "none"]


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Which activations are computed again in the backward pass instead of being kept."""

    mode: RecomputeMode = "full"
    """``full`` keeps only what enters a block; ``selective`` also keeps the results of ``ops``; ``none`` keeps all."""
    every: int = 1
    """Recompute every k-th block of each stack: 2 for every second one."""
    ops: Sequence[str] = ()
    """With ``selective``: operators whose results are kept, such as ``"mm"`` or ``"my_library.my_op"``. Empty: matrix
    products, convolutions and attention, which cost most to compute again."""
    blocks: Sequence[str] = ()
    """Class names or module name patterns of the blocks that count; empty: all blocks of all stacks."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecomputeMode):
            raise _wrong(
                f"RecomputeOptions.mode must be one of {', '.join(map(repr, get_args(RecomputeMode)))}.",
                f"mode={self.mode!r}",
                "use one of these words",
            )
        every: object = self.every
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise _wrong(
                "RecomputeOptions.every must be a positive integer.",
                f"every={self.every!r}",
                "1 recomputes every block, 2 every second one",
            )
        for name in ("ops", "blocks"):
            value = tuple(getattr(self, name)) if isinstance(getattr(self, name), (list, tuple)) else None
            if value is None or not all(isinstance(entry, str) for entry in value):
                raise _wrong(
                    f"RecomputeOptions.{name} must be a list of texts.",
                    f"{name}={getattr(self, name)!r}",
                    f"write {name}=[...]",
                )
            object.__setattr__(self, name, value)
        if self.ops and self.mode != "selective":
            raise _wrong(
                "RecomputeOptions.ops says what a selective recomputation keeps.",
                f"mode={self.mode!r}, ops={list(self.ops)}",
                "set mode='selective', or leave ops out",
            )


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How ``torch.compile`` treats each block."""

    backend: str = "inductor"
    """Name of a backend of torch.compile."""
    fullgraph: bool = True
    """A block must become one graph; what would break it in two is an error that names the line."""
    dynamic: bool | None = None
    """As in torch.compile: None finds out by the shapes it sees."""


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """What is recomputed in one run."""

    mode: RecomputeMode = "none"
    blocks: tuple[str, ...] = ()
    """Names of the blocks that are recomputed."""
    num_blocks: int = 0
    """Blocks of all stacks."""
    ops: tuple[str, ...] = ()
    """Operators whose results are kept, as words of torch (``"aten.mm.default"``)."""
    saved_bytes: int | None = None
    """Bytes kept from forward to backward for one batch of one rank; None if no run on fake tensors told it."""
    saved_bytes_without: int | None = None
    """The same if nothing were recomputed."""
    flops_again: int | None = None
    """FLOPs that the backward pass spends on recomputation."""


@dataclass(frozen=True, kw_only=True)
class CompilePlan:
    """What is compiled in one run."""

    blocks: tuple[str, ...] = ()
    options: CompileOptions = field(default_factory=CompileOptions)


def compile_options(value: bool | CompileOptions) -> CompileOptions | None:
    """Returns the options that the strategy's argument ``compile`` means, None for no compilation.

    Raises:
        ValueError: if it is neither a truth value nor options.
    """
    if isinstance(value, CompileOptions):
        return value
    if isinstance(value, bool):
        return CompileOptions() if value else None
    raise ValueError(
        message(
            "compile must be True, False or CompileOptions(...).",
            got=f"compile={value!r}",
            source="the strategy's arguments",
            change="compile=True compiles each block with torch's defaults",
        )
    )


def check_recompute(value: RecomputeOptions | None) -> RecomputeOptions | None:
    """Returns the strategy's argument ``recompute``.

    Raises:
        ValueError: if it is neither None nor options.
    """
    if value is None or isinstance(value, RecomputeOptions):
        return value
    raise ValueError(
        message(
            "recompute must be None or RecomputeOptions(...).",
            got=f"recompute={value!r}",
            source="the strategy's arguments",
            change="recompute=RecomputeOptions() keeps only what enters each block",
        )
    )


def _wrong(rule: str, got: str, change: str) -> ValueError:
    return ValueError(message(rule, got=got, source="RecomputeOptions(...)", change=change))
