"""Launchers that remember what the user asked of the Trainer before Lightning has resolved it.

Lightning tells a strategy that restores late neither whether the user passed ``weights_only`` nor that a path was asked
for as ``"last"``. Both go through the launcher, as arguments of the function to be launched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_pardist.strategies.lightning_api import Launcher, SubprocessScriptLauncher


@dataclass
class Asked:
    """What the user passed to ``fit``, ``validate``, ``test`` or ``predict``."""

    ckpt_path: str | None = None
    weights_only: bool | None = None

    def note(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reads the arguments of the function to be launched; only entries of the Trainer have them."""
        try:
            bound = inspect.signature(function).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {}
        path = bound.get("ckpt_path")
        self.ckpt_path = None if path is None else str(path)
        self.weights_only = bound.get("weights_only")


class InProcessLauncher(Launcher):
    """For ranks that somebody else has started: runs the function where it is."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("trainer", None)
        self._asked.note(function, args, kwargs)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing was started here."""


class ScriptLauncher(SubprocessScriptLauncher):
    """Starts the other ranks of this node by running the script again, as Lightning's does."""

    asked: Asked

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.asked.note(function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)
