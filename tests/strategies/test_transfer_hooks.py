"""The module is described with the batch that its step gets: after the transfer hooks, whoever defines them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(8), batch_size=4)  # type: ignore[arg-type]


class ModelWithHook(Model):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return F.one_hot(batch, 8).float()


class DataWithHook(Data):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return F.one_hot(batch, 8).float()


@pytest.mark.parametrize(
    ("model", "data"), [(ModelWithHook, Data), (Model, DataWithHook), (ModelWithHook, DataWithHook)]
)
def test_hooks_run_once_before_the_described_step(model: type[Model], data: type[Data]) -> None:
    trainer = L.Trainer(
        strategy="pardist_fsdp",
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = model()
    trainer.fit(module, data())
    profile = trainer.strategy.parallel_model.profile  # type: ignore[attr-defined]
    assert profile.source == "fake_run"
    assert profile.flops_forward == 3 * 2 * 4 * 8 * 8
    assert "on_after_batch_transfer" not in vars(module)
