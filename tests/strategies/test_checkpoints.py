"""Save on one layout, go on with another: the Trainer's own hooks over the checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.strategies.common import (
    HYBRID,
    LAYOUTS,
    Tower,
    assert_same_weights,
    decaying,
    fit_between_epochs,
    loader,
    make_trainer,
    weights,
)

ONE: dict[str, Any] = {}
WORLDS: dict[str, tuple[dict[str, Any], int]] = {
    "one": (ONE, 1),
    "fsdp": (LAYOUTS["fsdp"], 4),
    "hybrid": (HYBRID, 4),
    "zero1": (LAYOUTS["zero1"], 2),
    "ddp": (LAYOUTS["ddp"], 2),
}


class Scheduled(Tower):
    """Adam over two groups with a schedule, a tied weight and dropout-free steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.save_hyperparameters({"width": 12})

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}], lr=0.01, eps=1e-3
        )
        return decaying(optimizer)


def run(layout: dict[str, Any], world_size: int, steps: int, save: str | None, resume: str | None) -> Any:
    torch.manual_seed(0 if resume is None else 17)
    module, data = Scheduled(), loader(48, 16 // world_size)
    trainer, losses = fit_between_epochs(module, (layout, world_size), data, steps, save, resume)
    optimizer = trainer.optimizers[0]
    rates = [value for group in optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
    return weights(module), losses, rates, trainer.global_step


def loaded(layout: dict[str, Any], world_size: int, path: str) -> Any:
    torch.manual_seed(17)
    module = Scheduled()
    trainer = make_trainer(layout, world_size)
    trainer.validate(module, loader(32, 16 // world_size), ckpt_path=path, verbose=False)
    return weights(module)


@pytest.mark.parametrize("source", list(WORLDS))
def test_save_on_one_layout_go_on_with_any(run_distributed: Any, source: str, tmp_path: Path) -> None:
    layout, world_size = WORLDS[source]
    saved, *_ = run_distributed(run, layout, world_size, 3, str(tmp_path / "a"), None, world_size=world_size)[0]
    want, losses, rates, _ = run_distributed(run, ONE, 1, 6, None, None, world_size=1)[0]
    for name, (other, size) in WORLDS.items():
        got = run_distributed(loaded, other, size, str(tmp_path / "a.ckpt"), world_size=size)
        assert_same_weights(got[0], saved, rtol=0)
        final, tail, final_rates, steps = run_distributed(
            run, other, size, 6, None, str(tmp_path / "a.ckpt"), world_size=size
        )[-1]
        assert steps == 6, name
        assert tail == pytest.approx(losses[3:], rel=1e-6), name
        assert final_rates == pytest.approx(rates)
        assert_same_weights(final, want)


def with_callback(layout: dict[str, Any], folder: str, save_last: Any, asynchronous: bool) -> Any:
    torch.manual_seed(0)
    options = CheckpointOptions(async_save=asynchronous)
    callback = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=save_last)
    trainer = make_trainer(
        {**layout, "checkpoint": options}, 2, max_epochs=4, callbacks=[callback], enable_checkpointing=True
    )
    module = Scheduled()
    trainer.fit(module, loader(48, 8), loader(32, 8, seed=1))
    final = weights(module)
    best = trainer.validate(module, loader(32, 8, seed=1), ckpt_path="best", verbose=False)
    trainer.validate(module, loader(32, 8, seed=1), ckpt_path="last", verbose=False)
    return final, best, float(callback.best_model_score), weights(module)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last(
    run_distributed: Any, tmp_path: Path, save_last: Any, asynchronous: bool
) -> None:
    for name in ("fsdp", "ddp"):
        folder = tmp_path / name
        results = run_distributed(with_callback, LAYOUTS[name], str(folder), save_last, asynchronous, world_size=2)
        final, best, score, last = results[0]
        assert best[0]["val_loss"] == pytest.approx(score, rel=1e-6)
        assert_same_weights(last, final, rtol=0)
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        assert len(names) == 3, names
        assert (folder / "last.ckpt").exists(), "a dangling link"
        assert (folder / "last.ckpt").is_symlink() == (save_last == "link")


class Editing(Tower):
    """Edits its weights while they are loaded, as users do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"of": "the user"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]
        state: dict[str, Tensor] = checkpoint["state_dict"]
        state["out.bias"] = torch.full((1,), 7.0)


def edited(layout: dict[str, Any], path: str) -> Any:
    module = Editing()
    trainer = make_trainer(layout, 2, max_steps=1)
    trainer.fit(module, loader(16, 4))
    trainer.save_checkpoint(path)
    trainer.validate(module, loader(16, 4), ckpt_path=path, verbose=False)
    return weights(module)["out.bias"].item(), module.note


def test_hooks_that_edit_a_checkpoint_are_heard(run_distributed: Any, tmp_path: Path) -> None:
    for name in ("ddp", "fsdp"):
        for result in run_distributed(edited, LAYOUTS[name], str(tmp_path / name), world_size=2):
            assert result == (7.0, {"of": "the user"})
