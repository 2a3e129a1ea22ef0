"""What a checkpoint may hold, what it must be of, and what is said when it is not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.resume.common import LAYOUTS, Losses, Tower, attempt, logged, make_trainer, numbered, weights
from tests.strategies.common import assert_same_weights

FSDP = LAYOUTS["fsdp"]


@dataclass
class Settings:
    """A class of the user's, which no file may bring along unasked."""

    depth: int = 3


class Configured(Tower):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.save_hyperparameters()


def configured() -> Configured:
    return Configured(Settings())


class Wider(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up, self.blocks[1].down = nn.Linear(12, 30), nn.Linear(30, 12)


class Longer(Tower):
    """With a part that the checkpoint lacks, and without one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(12, 12)
        del self.blocks[2]


def fit(
    make: Callable[[], Any], path: str | None = None, save: str | None = None, epochs: int = 2, **options: Any
) -> Any:
    seed_everything(1, verbose=False)
    module, losses = make(), Losses()
    callbacks: list[Any] = [losses]
    if save is not None:
        callbacks.append(ModelCheckpoint(save, "at", enable_version_counter=False, **options.pop("checkpoint", {})))
    trainer = make_trainer(FSDP, 2, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=save is not None)
    trainer.fit(module, DataLoader(numbered(16), 4), ckpt_path=path, **options)
    return losses.values, weights(module)


def hyperparameters(folder: str) -> Any:
    whole = fit(configured)
    fit(configured, save=folder, epochs=1)
    path = f"{folder}/at.ckpt"
    refused = attempt(lambda: fit(configured, path))
    resumed = fit(configured, path, weights_only=False)
    again = attempt(lambda: fit(configured, path))  # what was allowed once is not allowed for good
    trainer = make_trainer(FSDP, 2)
    loader = DataLoader(numbered(16), 4)
    evaluated = attempt(lambda: trainer.validate(configured(), loader, ckpt_path=path, verbose=False))
    trainer.validate(configured(), loader, ckpt_path=path, weights_only=False, verbose=False)
    return whole, resumed, [refused, again, evaluated]


def test_pickled_hyperparameters_need_the_users_word(run_distributed: Any, tmp_path: Path) -> None:
    for (losses, final), (again, last), refusals in run_distributed(hyperparameters, str(tmp_path), world_size=2):
        assert again == losses[2:]
        assert_same_weights(last, final, rtol=0)
        for text in refusals:
            assert "hyper_parameters" in text and "tests.resume.test_trust.Settings" in text, text
            assert "add_safe_globals" in text and "weights_only=False" in text, text


class Lenient(Longer):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


def other_models(folder: str) -> Any:
    fit(Tower, save=folder, epochs=1)
    path, loader = f"{folder}/at.ckpt", DataLoader(numbered(16), 4)
    texts = [attempt(lambda: fit(Wider, path)), attempt(lambda: fit(Longer, path))]
    texts.append(attempt(lambda: make_trainer(FSDP, 2).validate(Longer(), loader, ckpt_path=path, verbose=False)))
    module = Lenient()
    before = {name: value.detach().clone() for name, value in module.extra.named_parameters()}
    with logged() as lines:
        make_trainer(FSDP, 2).validate(module, loader, ckpt_path=path, verbose=False)
    kept = weights(module)
    filled = Tower()
    make_trainer(FSDP, 2).validate(filled, loader, ckpt_path=path, verbose=False)
    same = all(torch.equal(kept[f"extra.{n}"], v) for n, v in before.items()) and torch.equal(
        kept["blocks.0.up.weight"], weights(filled)["blocks.0.up.weight"]
    )
    with logged() as fitting:
        fit(Lenient, path)
    return texts, same, lines, fitting


def test_another_model_is_refused_by_name_unless_lenient(run_distributed: Any, tmp_path: Path) -> None:
    results = run_distributed(other_models, str(tmp_path), world_size=2)
    for texts, same, lines, fitting in results:
        wider, longer, validated = texts
        assert "blocks.1.up.weight" in wider and "(24, 12)" in wider and "(30, 12)" in wider, wider
        for text in (longer, validated):
            assert "extra.weight" in text and "blocks.2.up.weight" in text and "strict_loading=False" in text, text
        assert same
        assert any("extra.weight" in line and "blocks.2.up.weight" in line for line in lines), lines
        assert any("extra.weight" in line for line in fitting), fitting


def stateless(folder: str) -> Any:
    whole = fit(Tower, epochs=2)
    fit(Tower, save=folder, epochs=1)
    return whole, fit(Tower, f"{folder}/at.ckpt")


def test_an_optimizer_without_state_resumes(run_distributed: Any, tmp_path: Path) -> None:
    for (losses, final), (again, last) in run_distributed(stateless, str(tmp_path), world_size=2):
        assert again == losses[2:]
        assert_same_weights(last, final, rtol=0)


def of_weights(folder: str) -> Any:
    _, final = fit(Tower, save=folder, epochs=1, checkpoint={"save_weights_only": True})
    module, path = Tower(), f"{folder}/at.ckpt"
    make_trainer(FSDP, 2).validate(module, DataLoader(numbered(16), 4), ckpt_path=path, verbose=False)
    return final, weights(module), attempt(lambda: fit(Tower, path))


def test_weights_evaluate_and_do_not_resume(run_distributed: Any, tmp_path: Path) -> None:
    for final, evaluated, text in run_distributed(of_weights, str(tmp_path), world_size=2):
        assert_same_weights(evaluated, final, rtol=0)
        assert "save_weights_only" in text, text


def newer(folder: str) -> Any:
    return attempt(lambda: fit(Tower, f"{folder}/at.ckpt"))


def test_a_newer_format_is_refused(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(stateless, str(tmp_path), world_size=2)
    manifest = tmp_path / "at.ckpt" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["format_version"] = 99
    del content["crc32"]
    content["crc32"] = f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
    manifest.write_text(json.dumps(content))
    for text in run_distributed(newer, str(tmp_path), world_size=2):
        assert "format version 99" in text and "update lightning_pardist" in text, text


class Untrained(Tower):
    """Learns nothing by gradients."""

    def configure_optimizers(self) -> None:
        return None


def test_a_module_without_optimizers_is_saved_and_resumed(run_distributed: Any, tmp_path: Path) -> None:
    for losses, _ in run_distributed(untrained, str(tmp_path), world_size=2):
        assert len(losses) == 2


def untrained(folder: str) -> Any:
    fit(Untrained, save=folder, epochs=1)
    return fit(Untrained, f"{folder}/at.ckpt")
