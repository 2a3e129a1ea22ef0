"""What HybridStrategy refuses before anything is set up."""

from __future__ import annotations

from typing import Literal, get_args

from lightning.pytorch import LightningModule

from lightning_pardist.base.errors import message
from lightning_pardist.strategies import lightning_api

OnNonFinite = Literal["propagate", "skip", "raise"]


def check_on_nonfinite(value: OnNonFinite) -> OnNonFinite:
    """Returns the word if it is one.

    Raises:
        ValueError: otherwise.
    """
    if value in get_args(OnNonFinite):
        return value
    raise ValueError(
        message(
            f"on_nonfinite_loss must be one of {', '.join(get_args(OnNonFinite))}.",
            got=f"on_nonfinite_loss={value!r}",
            source="the strategy's arguments",
            change="'propagate' does what one process does; 'skip' drops the step on all ranks; 'raise' stops",
        )
    )


def refuse_compiled(module: LightningModule) -> None:
    """Refuses a LightningModule that ``torch.compile`` was called on as a whole.

    Raises:
        ValueError: says what to compile instead.
    """
    if not lightning_api.is_compiled(module):
        return
    raise ValueError(
        message(
            "The LightningModule itself must not be compiled: sharding hooks sit between its parts.",
            got=f"torch.compile({type(module).__name__})",
            source="the model passed to the Trainer",
            change="pass the plain module, and HybridStrategy(compile=True), which compiles each of its blocks",
        )
    )
