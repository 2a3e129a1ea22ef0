"""A small module and a way to train it, shared by the tests of the strategy's semantics."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import whole_tensor
from lightning_pardist.strategies.hybrid import HybridStrategy

FEATURES = 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "fsdp": {"zero_stage": 3},
}
HYBRID = {"zero_stage": 3, "data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(L.LightningModule):
    """An MLP tower; what its steps do can be changed by functions, so that a test shows only what it is about."""

    def __init__(self, lr: float = 0.05, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(FEATURES, 1)
        self.lr, self.make_optimizer = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=self.lr)


class Notes(L.Callback):
    """What every rank saw after every training batch."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def loader(rows: int, batch_size: int, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1).tanh()), batch_size=batch_size)


def make_trainer(layout: dict[str, Any] | None, world_size: int, **options: Any) -> L.Trainer:
    """A quiet Trainer; ``layout`` None is the one-process reference."""
    strategy = "auto" if layout is None else HybridStrategy(print_plan=False, **layout)
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **{**defaults, **options})


def decaying(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``configure_optimizers`` returns for a learning rate that shrinks with every step."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_between_epochs(
    module: L.LightningModule,
    world: tuple[dict[str, Any], int],
    data: DataLoader,
    steps: int,
    save: str | None,
    resume: str | None,
) -> tuple[L.Trainer, list[float]]:
    """Trains epochs of three batches, and returns the losses too.

    Args:
        module: the module.
        world: the layout, and its ranks.
        data: this rank's batches.
        steps: counted from the start of the first run.
        save: a checkpoint without its suffix, made where Lightning resumes exactly with plain loaders: between epochs.
        resume: a checkpoint to go on from.
    """
    notes = Notes()
    callbacks: list[L.Callback] = [notes]
    if save is not None:
        folder, name = os.path.split(save)
        callbacks.append(ModelCheckpoint(folder, name, save_on_train_epoch_end=True, enable_version_counter=False))
    trainer = make_trainer(*world, max_epochs=steps // 3, callbacks=callbacks, enable_checkpointing=save is not None)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, [metrics["train_loss"] for metrics in notes.metrics]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a shard."""
    return whole_tensor(tensor.detach()).clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def assert_same_weights(left: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=rtol, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
