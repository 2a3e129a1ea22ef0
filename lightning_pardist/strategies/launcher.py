"""Launchers that remember what the user asked of the Trainer before Lightning has resolved it.

Lightning tells a strategy that restores late neither whether the user passed ``weights_only`` nor that a path was asked
for as ``"last"``. Both go through the launcher, as arguments of the function to be launched.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_pardist.checkpoint import finish_interrupted
from lightning_pardist.strategies.lightning_api import Launcher, SubprocessScriptLauncher, callbacks


@dataclass
class Asked:
    """What the user passed to ``fit``, ``validate``, ``test`` or ``predict``."""

    ckpt_path: str | None = None
    weights_only: bool | None = None

    def note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: Trainer | None
    ) -> None:
        """Reads the arguments of the function to be launched; only entries of the Trainer have them."""
        try:
            bound = inspect.signature(function).bind(*args, **kwargs).arguments
        except (TypeError, ValueError):
            bound = {}
        path = bound.get("ckpt_path")
        self.ckpt_path = None if path is None else str(path)
        self.weights_only = bound.get("weights_only")
        if self.ckpt_path == "last" and trainer is not None:
            # Before Lightning looks: a run that died between two renames has left its last checkpoint without a name.
            for folder in _checkpoint_folders(trainer):
                finish_interrupted(folder)


def _checkpoint_folders(trainer: Trainer) -> list[str]:
    """Returns where the Trainer's callbacks keep checkpoints."""
    default = os.path.join(trainer.default_root_dir, "checkpoints")
    return [str(c.dirpath or default) for c in callbacks(trainer) if isinstance(c, ModelCheckpoint)]


class InProcessLauncher(Launcher):
    """For ranks that somebody else has started: runs the function where it is."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._asked.note(function, args, kwargs, trainer)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing was started here."""


class ScriptLauncher(SubprocessScriptLauncher):
    """Starts the other ranks of this node by running the script again, as Lightning's does."""

    asked: Asked

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.asked.note(function, args, kwargs, trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)
