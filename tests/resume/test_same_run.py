"""A run with saves is the run without; a run that was interrupted is the run that was not, random numbers included."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.resume.common import LAYOUTS, Dropping, Losses, Stop, Stopped, logged, make_trainer, numbered, weights

# ---- saves change nothing


class SaveAlways(L.Callback):
    """Saves before the first step, inside every accumulation window, before and after steps, amid validations."""

    def __init__(self, folder: str) -> None:
        self.folder, self.count = folder, 0

    def save(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{self.count}")
        self.count += 1

    on_train_start = on_train_batch_start = on_train_batch_end = on_validation_batch_end = save
    on_before_optimizer_step = on_after_backward = save


class Frozen(Dropping):
    """Half of it is frozen; a freeze in the second epoch leaves Adam's state behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inp.requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[0].requires_grad_(False)


def trained(layout: dict[str, Any], folder: str | None, behind: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    seed_everything(3, verbose=False)
    module, losses = Frozen(), Losses()
    callbacks: list[Any] = [losses, *([SaveAlways(folder)] if folder else [])]
    trainer = make_trainer(
        {**layout, "checkpoint": CheckpointOptions(async_save=behind)},
        2,
        max_epochs=2,
        callbacks=callbacks,
        accumulate_grad_batches=2,
        val_check_interval=3,
        num_sanity_val_steps=1,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, DataLoader(numbered(40), 4, shuffle=True), DataLoader(numbered(16), 4))
    assert trainer.global_step == 6  # a partial window ends every epoch
    return losses.values, weights(module)


def with_and_without_saves(folder: str) -> dict[str, Any]:
    results = {}
    for name, layout in LAYOUTS.items():
        plain = trained(layout, None)
        results[name] = [plain, trained(layout, f"{folder}/{name}")]
        if name in {"fsdp", "zero1"}:
            results[name].append(trained(layout, f"{folder}/{name}-behind", behind=True))
    return results


def test_a_run_with_saves_is_the_run_without(run_distributed: Any, tmp_path: Path) -> None:
    results = run_distributed(with_and_without_saves, str(tmp_path), world_size=2)
    for rank in results:
        for name, (plain, *saved) in rank.items():
            for losses, final in saved:
                assert losses == plain[0], name
                assert all(torch.equal(final[key], value) for key, value in plain[1].items()), name
    # Saved behind, a checkpoint is the one that training would have waited for, bit by bit.
    for name in ("fsdp", "zero1"):
        for count in (0, 5, 17):
            same_files(tmp_path / name / str(count), tmp_path / f"{name}-behind" / str(count), tmp_path)


def same_files(one: Path, other: Path, folder: Path) -> None:
    contents = []
    for path in (one, other):
        (folder / "whole.ckpt").unlink(missing_ok=True)
        ckpt.consolidate(str(path), str(folder / "whole.ckpt"))
        contents.append(torch.load(folder / "whole.ckpt", weights_only=True))
    left, right = contents
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right["state_dict"][name]) for name, value in left["state_dict"].items())
    for states, others in zip(left["optimizer_states"], right["optimizer_states"], strict=True):
        assert states["param_groups"] == others["param_groups"]
        for index, state in states["state"].items():
            assert all(torch.equal(value, others["state"][index][key]) for key, value in state.items())


# ---- random numbers


class KeepFirst(ModelCheckpoint):
    """Saves once."""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if not getattr(self, "saved", False):
            super()._save_checkpoint(trainer, filepath)
            self.saved = True


class Counting(Dropping):
    """Asks for the number of steps before the run has begun, so that Lightning prepares the data early."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def interrupted(
    layout: dict[str, Any], world_size: int, folder: str, when: str, stateful: bool, counting: bool = False
) -> Any:
    """The whole run, and what comes of its checkpoint."""

    def run(resume: bool) -> Any:
        seed_everything(11, verbose=False)
        if resume:  # the order that Lightning deals follows that seed, everything else the checkpoint
            torch.manual_seed(12)
        module, losses = Counting() if counting else Dropping(), Losses()
        kind = StatefulDataLoader if stateful else DataLoader
        triggers: dict[str, Any] = {
            "at the end of the epoch": {"save_on_train_epoch_end": True},
            "after validation": {"save_on_train_epoch_end": False},
            "amid the epoch": {"every_n_train_steps": 8},
            "at the last batch": {"every_n_train_steps": 6},
        }[when]
        keep = KeepFirst(folder, "at", enable_version_counter=False, **triggers)
        trainer = make_trainer(
            layout, world_size, max_epochs=2, callbacks=[losses, *([] if resume else [keep])],
            enable_checkpointing=not resume,
        )  # fmt: skip
        loader = kind(numbered(48), batch_size=8 // world_size, shuffle=True)
        validation = None if when == "at the last batch" else DataLoader(numbered(16), 4)
        with logged() as lines:
            trainer.fit(module, loader, validation, ckpt_path=f"{folder}/at.ckpt" if resume else None)
        return losses.values, weights(module), lines

    return run(resume=False), run(resume=True)


WHEN = [
    ("at the end of the epoch", False),
    ("at the end of the epoch", True),
    ("after validation", False),
    ("after validation", True),
    ("amid the epoch", True),
    ("at the last batch", True),
    ("at the last batch", False),
]


@pytest.mark.parametrize(("when", "stateful"), WHEN, ids=[f"{w}-{'stateful' if s else 'plain'}" for w, s in WHEN])
def test_random_numbers_go_on(run_distributed: Any, tmp_path: Path, when: str, stateful: bool) -> None:
    for name, layout, world_size in (("fsdp", LAYOUTS["fsdp"], 2), ("one", {}, 1)):
        folder = str(tmp_path / name)
        results = run_distributed(interrupted, layout, world_size, folder, when, stateful, world_size=world_size)
        for (losses, final, _), (again, last, lines) in results:
            assert again == losses[len(losses) - len(again) :], (name, losses)
            assert len(again) == (4 if when == "amid the epoch" else 6)
            assert all(torch.equal(last[key], value) for key, value in final.items()), name
            assert not lines, lines


@pytest.mark.parametrize("when", ["amid the epoch", "at the end of the epoch"])
def test_a_run_that_prepares_its_data_early_goes_on(run_distributed: Any, tmp_path: Path, when: str) -> None:
    results = run_distributed(interrupted, LAYOUTS["fsdp"], 2, str(tmp_path), when, True, True, world_size=2)
    for (losses, final, _), (again, last, lines) in results:
        assert again == losses[len(losses) - len(again) :]
        assert all(torch.equal(last[key], value) for key, value in final.items())
        assert not lines, lines


def in_parts(folder: str, stops: tuple[int, ...]) -> Any:
    """Three epochs of three steps, stopped after these steps and resumed each time from what the last step saved."""
    found: list[float] = []
    for part, (start, stop) in enumerate(zip((0, *stops), (*stops, -1))):
        seed_everything(11, verbose=False)
        module, losses = Dropping(), Losses()
        keep = ModelCheckpoint(folder, f"{stops}-at", every_n_train_steps=1, enable_version_counter=False)
        trainer = make_trainer(
            LAYOUTS["fsdp"], 2, max_epochs=3, callbacks=[losses, Stop(stop - start), keep], enable_checkpointing=True
        )
        with contextlib.suppress(Stopped):
            trainer.fit(
                module,
                StatefulDataLoader(numbered(24), batch_size=4, shuffle=True),
                ckpt_path=f"{folder}/{stops}-at.ckpt" if part else None,
            )
        found += losses.values
    return found, weights(module)


STOPS = [(3, 4), (3, 6), (6, 7), (1, 3, 4, 6, 7)]


def all_in_parts(folder: str) -> Any:
    return {stops: in_parts(folder, stops) for stops in [(), *STOPS]}


def test_stopped_at_the_end_of_an_epoch_and_again_soon_after(run_distributed: Any, tmp_path: Path) -> None:
    """Resumed from the end of an epoch, Lightning runs the next one without counting it: a save there must know."""
    for results in run_distributed(all_in_parts, str(tmp_path), world_size=2):
        losses, final = results[()]
        assert len(losses) == 9
        for stops in STOPS:
            again, last = results[stops]
            assert again == losses, (stops, again, losses)
            assert all(torch.equal(last[key], value) for key, value in final.items()), stops


def elsewhere(folder: str) -> Any:
    seed_everything(12, verbose=False)
    module = Dropping()
    trainer = make_trainer(LAYOUTS["fsdp"], 2, max_epochs=2)
    with logged() as lines:
        trainer.fit(module, DataLoader(numbered(48), 4), ckpt_path=f"{folder}/at.ckpt")
    return lines, weights(module)


def test_another_layout_draws_anew_and_says_so(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(interrupted, {}, 1, str(tmp_path), "at the end of the epoch", False, world_size=1)
    first, second = (run_distributed(elsewhere, str(tmp_path), world_size=2)[0] for _ in range(2))
    assert any("seeded anew from its seed 11 and step 6" in line for line in first[0]), first[0]
    assert all(torch.equal(second[1][name], value) for name, value in first[1].items())
