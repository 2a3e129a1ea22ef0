"""Runs a user's program up to ``trainer.fit`` and takes what it was about to train; nothing trains."""

from __future__ import annotations

import functools
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI

from lightning_pardist.base.errors import message

_HARMLESS = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "logger": False,
    "sync_batchnorm": False,
}
"""What the captured Trainer is made with: this process must not start others, nor look for devices."""


@dataclass
class Captured:
    """What a program was about to do."""

    module: LightningModule
    trainer: Trainer
    loaders: Any
    datamodule: LightningDataModule | None
    asked: dict[str, Any]
    """Arguments that the program gave to the Trainer."""
    notes: list[str] = field(default_factory=list)


class _ReachedFitError(BaseException):
    """Ends the program at ``fit``; no ``except Exception`` of the user's stops it."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured


def capture(target: str, arguments: str = "") -> Captured:
    """Returns what a script, or a LightningCLI configuration, would fit. Modules are built on the meta device.

    Args:
        target: path of a Python script, or of a YAML or JSON file with ``model: class_path``.
        arguments: the script's own arguments, as one text.

    Raises:
        ValueError: if it cannot be run, or never calls ``fit``.
    """
    path = Path(target)
    if not path.is_file():
        raise _failed(target, "there is no such file", "give the path of a script or of a LightningCLI configuration")
    is_config = path.suffix.lower() in (".yaml", ".yml", ".json")
    notes: list[str] = []
    try:
        with _intercepted(notes), _program(path, shlex.split(arguments), is_config=is_config):
            if is_config:
                LightningCLI(args=["fit", "--config", str(path)], save_config_callback=None)
            else:
                runpy.run_path(str(path), run_name="__main__")
    except _ReachedFitError as reached:
        reached.captured.notes += notes
        return reached.captured
    except SystemExit as error:
        change = "give the script's arguments with --args '...'"
        if is_config:
            change = (
                "a configuration without model.class_path belongs to a script: "
                f"pardist plan that_script.py --args 'fit --config {target}'"
            )
        raise _failed(target, f"the program ended with exit status {error.code}", change) from error
    except Exception as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        change = "run it by itself first; modules that it imports must be installed here, devices are not needed"
        raise _failed(target, last, change) from error
    raise _failed(target, "it ended without a call of Trainer.fit", "plan the script that starts the training")


def _failed(target: str, got: str, change: str) -> ValueError:
    return ValueError(
        message("A plan needs a program that reaches Trainer.fit.", got=got, source=target, change=change)
    )


@contextmanager
def _program(path: Path, arguments: list[str], *, is_config: bool) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(Path.cwd() if is_config else path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


@contextmanager
def _intercepted(notes: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        make = Trainer.__init__

        @functools.wraps(make)
        def make_harmless(self: Trainer, *args: Any, **kwargs: Any) -> None:
            kept = {name: value for name, value in kwargs.items() if name != "plugins"}
            make(self, *args, **{**kept, **_HARMLESS, "precision": "32-true"})
            vars(self)["_pardist_asked"] = kwargs

        def fit(
            self: Trainer,
            model: LightningModule,
            train_dataloaders: Any = None,
            val_dataloaders: Any = None,
            datamodule: LightningDataModule | None = None,
            **options: Any,
        ) -> None:
            if isinstance(train_dataloaders, LightningDataModule):
                train_dataloaders, datamodule = None, train_dataloaders
            asked = vars(self)["_pardist_asked"]
            raise _ReachedFitError(Captured(model, self, train_dataloaders, datamodule, asked))

        _replace(stack, Trainer, "__init__", make_harmless)
        _replace(stack, Trainer, "fit", fit)
        _build_on_meta(stack, notes)
        yield


def _replace(stack: ExitStack, owner: type, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _build_on_meta(stack: ExitStack, notes: list[str]) -> None:
    """Lets every LightningModule, defined already or by the program, make its tensors on the meta device."""

    def wrap(cls: type) -> None:
        if "__init__" in vars(cls):
            _replace(stack, cls, "__init__", _on_meta(vars(cls)["__init__"], notes))

    def below(cls: type[Any]) -> Iterator[type[Any]]:
        child: type[Any]
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    for cls in {*below(LightningModule)}:
        wrap(cls)

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(LightningModule, cls).__init_subclass__(**kwargs)
        wrap(cls)

    _replace(stack, LightningModule, "__init_subclass__", classmethod(init_subclass))


def _on_meta(make: Callable[..., None], notes: list[str]) -> Callable[..., None]:
    @functools.wraps(make)
    def on_meta(self: Any, *args: Any, **kwargs: Any) -> None:
        run_on_meta(lambda: make(self, *args, **kwargs), type(self).__name__, notes)

    return on_meta


def run_on_meta(build: Callable[[], None], what: str, notes: list[str]) -> None:
    """Runs ``build`` on the meta device, and once more on the host if it reads values there."""
    try:
        with torch.device("meta"):
            build()
    except (NotImplementedError, RuntimeError) as error:
        build()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        notes.append(f"{what} was built on the host, for it reads values while it is built ({first})")
