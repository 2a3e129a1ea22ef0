"""What the tests of resuming share: runs that stop and go on, with every sample's number noted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.strategies.common import FEATURES, HYBRID, LAYOUTS, Tower, make_trainer, weights

__all__ = ["HYBRID", "LAYOUTS", "Losses", "Stop", "Tower", "logged", "make_trainer", "numbered", "weights"]


class Losses(L.Callback):
    """The loss of every training batch, as logged: the mean over ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


class Stop(L.Callback):
    """Ends the run after so many batches, in the middle of an epoch, without the end of the epoch."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_start(self, *args: Any) -> None:  # what is saved at the end of a batch comes after callbacks
        if not self._left:
            raise Stopped
        self._left -= 1


class Stopped(Exception):
    """The run ends here."""


def numbered(rows: int) -> TensorDataset:
    """Samples with their number."""
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(-1).tanh(), torch.arange(rows))


class Dropping(Tower):
    """Draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__(optimizer=torch.optim.Adam)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class Seeing(Tower):
    """Notes which samples its steps had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[2].tolist())
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects what the package logs on this rank."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning_pardist"), Keep(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def attempt(fn: Callable[[], Any]) -> str:
    """Returns the message of the exception that ``fn`` raises."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
