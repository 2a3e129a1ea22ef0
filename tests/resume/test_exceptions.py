"""An exception on one rank or on all, while callbacks would save: an end in bounded time, a checkpoint if all came."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.strategies import checkpointing
from tests.resume.common import LAYOUTS, Dropping, Losses, Tower, attempt, logged, make_trainer, numbered, weights


class Failing(L.Callback):
    def __init__(self, ranks: tuple[int, ...], batch: int) -> None:
        self.ranks, self.batch = ranks, batch

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch and trainer.global_rank in self.ranks:
            raise ZeroDivisionError(f"rank {trainer.global_rank} fails")


def failing(layout: str, kind: str, ranks: tuple[int, ...], folder: str) -> Any:
    savers: dict[str, Any] = {
        "on exception": lambda: OnExceptionCheckpoint(folder),
        "model checkpoint": lambda: ModelCheckpoint(folder, "on_exception", save_on_exception=True, save_last=True),
    }
    seed_everything(1, verbose=False)
    callbacks = [savers[kind](), Failing(ranks, 3)]
    trainer = make_trainer(LAYOUTS[layout], 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    started = time.monotonic()
    # Who waits in vain need not wait long; those who all come may be slow on a busy machine.
    roll_call = mock.patch.object(checkpointing, "ROLL_CALL_S", 2.0 if len(ranks) == 1 else 60.0)
    with roll_call, logged() as lines:
        text = attempt(lambda: trainer.fit(Tower(), DataLoader(numbered(32), 4), ckpt_path=None))
    return text, lines, time.monotonic() - started


class Failed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)


def raising(layout: str, kind: str, folder: str) -> None:
    """Raises what the Trainer raised: the pool takes this rank's process group down then, as a dying process would."""
    text, lines, seconds = failing(layout, kind, (1,), folder)
    raise Failed(f"{seconds:.1f}|{text}|{lines}")


@pytest.mark.parametrize("kind", ["on exception", "model checkpoint"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_one_rank_fails(run_distributed: Any, tmp_path: Path, layout: str, kind: str) -> None:
    other, failed = run_distributed.errors(raising, layout, kind, str(tmp_path), world_size=2)
    seconds, text, lines = str(failed).split("|")
    assert float(seconds) < 90, seconds
    assert "ZeroDivisionError: rank 1 fails" in text
    assert "not all ranks came to save" in lines, lines
    assert "rank 1 fails" not in str(other) and "|" in str(other)  # it lost its peer, and ended too
    assert not list(tmp_path.glob("*.ckpt")), os.listdir(tmp_path)


def all_fail(kind: str, folder: str) -> Any:
    text, _, seconds = failing("fsdp", kind, (0, 1), folder)
    losses = Losses()
    seed_everything(1, verbose=False)
    whole = make_trainer(LAYOUTS["fsdp"], 2, max_epochs=2, callbacks=[losses])
    module = Tower()
    whole.fit(module, DataLoader(numbered(32), 4))
    path = f"{folder}/on_exception.ckpt"
    step = torch.load(f"{path}/trainer.pt", weights_only=True)["global_step"]
    return text, seconds, step


@pytest.mark.parametrize("kind", ["on exception", "model checkpoint"])
def test_all_ranks_fail_and_save(run_distributed: Any, tmp_path: Path, kind: str) -> None:
    for text, seconds, step in run_distributed(all_fail, kind, str(tmp_path), world_size=2):
        assert text.startswith("ZeroDivisionError") and seconds < 90
        assert step == 3
    assert ckpt.verify(str(tmp_path / "on_exception.ckpt")) > 0


# ---- saves behind training


class SaveAndFail(L.Callback):
    def __init__(self, path: str, fails: bool) -> None:
        self.path, self.fails = path, fails

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)
            self.stall = trainer.strategy.checkpoint_stall_s  # type: ignore[attr-defined]
            if self.fails:
                raise ZeroDivisionError


def behind(folder: str) -> Any:
    found = []
    for fails in (True, False):
        path = f"{folder}/{fails}"
        callback = SaveAndFail(path, fails)
        options = CheckpointOptions(async_save=True)
        trainer = make_trainer({**LAYOUTS["fsdp"], "checkpoint": options}, 2, max_epochs=1, callbacks=[callback])
        with logged(20) as lines:
            attempt(lambda trainer=trainer: trainer.fit(Dropping(), DataLoader(numbered(32), 4)))
        found.append((ckpt.verify(path), callback.stall, lines))
    # Joined before it is loaded: the very next thing is a resume from it.
    seed_everything(4, verbose=False)
    module = Dropping()
    trainer = make_trainer({**LAYOUTS["fsdp"], "checkpoint": CheckpointOptions(async_save=True)}, 2, max_epochs=1)
    trainer.fit(module, DataLoader(numbered(32), 4))
    trainer.save_checkpoint(f"{folder}/end")
    other = Dropping()
    trainer.validate(other, DataLoader(numbered(32), 4), ckpt_path=f"{folder}/end", verbose=False)
    return found, weights(module), weights(other)


def test_saves_behind_are_joined(run_distributed: Any, tmp_path: Path) -> None:
    for rank, (found, saved, loaded) in enumerate(run_distributed(behind, str(tmp_path), world_size=2)):
        for checked, stall, lines in found:
            assert checked > 0 and 0 < stall < 60
            assert rank or any("training stood still for" in line for line in lines), lines
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
