"""Samples that cannot be dealt evenly count once all the same: validate and test give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

from tests.strategies.common import HYBRID, LAYOUTS, Tower, loader, make_trainer


class Judged(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = BinaryAccuracy(), MeanMetric()

    def _judge(self, stage: str, batch: list[Tensor]) -> None:
        prediction = self(batch[0])
        self.log(f"{stage}_loss", F.mse_loss(prediction, batch[1]))
        self.log(f"{stage}_rows", float(len(batch[0])), reduce_fx="sum")
        self.log(f"{stage}_max", prediction.max(), reduce_fx="max")
        self.accuracy(prediction.sigmoid(), (batch[1] > 0).int())
        self.mean.update(prediction)
        self.log(f"{stage}_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log(f"{stage}_mean", self.mean, on_step=False, on_epoch=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._judge("val", batch)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._judge("test", batch)


def evaluate(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Judged()
    trainer = make_trainer(layout, world_size)
    validation = [loader(9, 2, seed=1), loader(4, 1, seed=2)]
    trainer.fit(module, loader(32, 16 // world_size), validation)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(module, validation, verbose=False)
    return fitted, validated, trainer.test(module, loader(7, 3, seed=3), verbose=False)


@pytest.mark.parametrize(("world_size", "name"), [(2, "ddp"), (2, "zero2"), (2, "fsdp"), (4, "hybrid")])
def test_every_sample_counts_once(run_distributed: Any, run_single: Any, world_size: int, name: str) -> None:
    layout = HYBRID if name == "hybrid" else LAYOUTS[name]
    want_fitted, want_validated, want_tested = run_single(evaluate, None, 1)
    for fitted, validated, tested in run_distributed(evaluate, layout, world_size, world_size=world_size):
        assert fitted == pytest.approx(want_fitted, rel=1e-5)
        for got, want in zip(validated + tested, want_validated + want_tested, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
