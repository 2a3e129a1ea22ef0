"""Between this package and plain Lightning, Hugging Face folders and Lightning's sharded folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.resume.common import FEATURES, LAYOUTS, Losses, Tower, attempt, logged, make_trainer, numbered, weights
from tests.strategies.common import assert_same_weights

FULL = {**LAYOUTS["fsdp"], "checkpoint": CheckpointOptions(format="full")}
SHARDED = LAYOUTS["fsdp"]


class Plain(Tower):
    """With hyperparameters, momentum and a schedule."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(layout: dict[str, Any] | None, world_size: int, save: str | None, resume: str | None, epochs: int) -> Any:
    seed_everything(2, verbose=False)
    module, losses = Plain(0.02), Losses()
    callbacks: list[Any] = [losses]
    if save is not None:
        callbacks.append(ModelCheckpoint(os.path.dirname(save), os.path.basename(save)))
    trainer = make_trainer(
        layout, world_size, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=save is not None
    )
    trainer.fit(module, DataLoader(numbered(24), 8 // world_size), ckpt_path=resume)
    return losses.values, weights(module), [group["lr"] for group in trainer.optimizers[0].param_groups]


OUTSIDE = """
import sys, json
import torch
import lightning as L
sys.path.insert(0, sys.argv[2])
from plain_module import Model
model = Model.load_from_checkpoint(sys.argv[1])
assert not any(name.split(".")[0] == "lightning_pardist" for name in sys.modules), "imported"
print(json.dumps({"lr": model.hparams.lr, "sums": {n: float(p.double().sum()) for n, p in model.named_parameters()}}))
"""

MODULE = """
import lightning as L
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

class Model(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.inp, self.out = nn.Linear(12, 12), nn.Linear(12, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
"""


def read_outside(path: str, folder: Path) -> Any:
    (folder / "plain_module.py").write_text(MODULE)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, path, str(folder)], capture_output=True, text=True, env=environment,
        timeout=280, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_ours_to_plain_lightning_and_back(run_distributed: Any, tmp_path: Path) -> None:
    """Epoch 1 here, epoch 2 there, compared with two epochs of plain Lightning."""
    losses, final, rates = run_distributed(fit, None, 1, None, None, 2, world_size=1)[0]
    _, saved, _ = run_distributed(fit, FULL, 2, str(tmp_path / "full"), None, 1, world_size=2)[0]
    run_distributed(fit, SHARDED, 2, str(tmp_path / "sharded"), None, 1, world_size=2)
    ckpt.consolidate(str(tmp_path / "sharded.ckpt"), str(tmp_path / "whole.ckpt"))
    run_distributed(fit, None, 1, str(tmp_path / "plain"), None, 1, world_size=1)
    for source in ("full", "whole", "plain"):
        path = str(tmp_path / f"{source}.ckpt")
        assert os.path.isfile(path)
        for layout, world_size in ((None, 1), ({}, 1), (SHARDED, 2), (LAYOUTS["zero1"], 2), (FULL, 2)):
            again, last, ended = run_distributed(fit, layout, world_size, None, path, 2, world_size=world_size)[0]
            assert again == pytest.approx(losses[3:], rel=1e-6), (source, layout)
            assert ended == pytest.approx(rates)
            assert_same_weights(last, final)
    for source in ("full", "whole"):
        outside = read_outside(str(tmp_path / f"{source}.ckpt"), tmp_path)
        assert outside["lr"] == 0.02
        assert outside["sums"] == pytest.approx({name: float(value.double().sum()) for name, value in saved.items()})


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).squeeze(-1)


class Around(Tower):
    """Keeps its network in ``self.model``, as modules around Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp, self.blocks, self.out
        self.model = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def hub_folder(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of a folder with two files and an index, named as in the inner network."""
    torch.manual_seed(9)
    state = {name: value.detach().clone() for name, value in Inner().named_parameters()}
    names = list(state)
    folder.mkdir()
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, chosen in parts.items():
        save_file({name: state[name] for name in chosen}, folder / file)
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return state


def from_weights(path: str) -> Any:
    """Evaluates with the weights, and trains on from them."""
    module, loader = Around(), DataLoader(numbered(16), 4)
    make_trainer(SHARDED, 2).validate(module, loader, ckpt_path=path, verbose=False)
    loaded = weights(module)
    started, begun = Around(), {}

    class First(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            begun.update(weights(module))

    with logged() as lines:
        trainer = make_trainer(SHARDED, 2, max_epochs=1, callbacks=[First()])
        trainer.fit(started, loader, ckpt_path=path)
    return loaded, begun, trainer.global_step, lines


def test_hugging_face_folders_are_weights(run_distributed: Any, tmp_path: Path) -> None:
    state = hub_folder(tmp_path / "hub")
    for loaded, begun, steps, lines in run_distributed(from_weights, str(tmp_path / "hub"), world_size=2):
        for found in (loaded, begun):
            assert_same_weights({name.removeprefix("model."): value for name, value in found.items()}, state, rtol=0)
        assert steps == 2
        assert any("holds weights only" in line for line in lines), lines


class Sharding(Around):
    def configure_model(self) -> None:
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def lightnings_folder(path: str) -> dict[str, Tensor]:
    seed_everything(1, verbose=False)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Sharding()
    trainer.fit(module, DataLoader(numbered(16), 4))
    trainer.save_checkpoint(path)
    return weights(module)


def test_lightnings_own_folders_are_weights(run_distributed: Any, tmp_path: Path) -> None:
    state = run_distributed(lightnings_folder, str(tmp_path / "theirs"), world_size=2)[0]
    for loaded, begun, _, _ in run_distributed(from_weights, str(tmp_path / "theirs"), world_size=2):
        assert_same_weights(loaded, state, rtol=0)
        assert_same_weights(begun, state, rtol=0)


def confused(folder: str) -> list[str]:
    """A file where a folder is due, and the reverse."""
    file, directory = f"{folder}/file.ckpt", f"{folder}/folder.ckpt"
    trainer, full = make_trainer(SHARDED, 2), make_trainer(FULL, 2)
    for each in (trainer, full):
        each.fit(Tower(), DataLoader(numbered(16), 4))
    return [
        attempt(lambda: trainer.save_checkpoint(file)),
        attempt(lambda: full.save_checkpoint(directory)),
        attempt(lambda: trainer.validate(Tower(), DataLoader(numbered(16), 4), ckpt_path=file, verbose=False)),
        attempt(lambda: trainer.validate(Tower(), DataLoader(numbered(16), 4), ckpt_path=directory, verbose=False)),
    ]


def test_files_where_folders_are_due(run_distributed: Any, tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("no checkpoint")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "notes.txt").write_text("mine")
    for texts in run_distributed(confused, str(tmp_path), world_size=2):
        for text, expected in zip(
            texts, ("a file lies there", "a folder lies there", "file.ckpt", "notes.txt"), strict=True
        ):
            assert expected in text, text
    assert (tmp_path / "file.ckpt").read_text() == "no checkpoint"
    assert (tmp_path / "folder.ckpt" / "notes.txt").read_text() == "mine"
