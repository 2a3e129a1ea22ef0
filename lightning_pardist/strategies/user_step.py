"""A step of the user's as Lightning asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule


@dataclass(frozen=True)
class UserStep:
    """A step that Lightning asks for."""

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Callable[[], AbstractContextManager[Any]]
    """The precision plugin's context of the step."""

    @property
    def batch(self) -> Any:
        """The whole batch of this data rank."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def run(self, module: LightningModule) -> Any:
        """Returns what the user's method returns for the whole batch."""
        return getattr(module, self.entry)(*self.args, **self.kwargs)

    def on(self, module: LightningModule, batch: Any) -> Any:
        """Returns what the user's method returns for another batch."""
        if self.args:
            return getattr(module, self.entry)(batch, *self.args[1:], **self.kwargs)
        first = next(iter(self.kwargs))
        return getattr(module, self.entry)(**{**self.kwargs, first: batch})
