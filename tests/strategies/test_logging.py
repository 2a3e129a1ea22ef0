"""self.log gives on every rank the number that one process with the whole batch would log."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

from tests.strategies.common import HYBRID, LAYOUTS, Notes, Tower, loader, make_trainer


class Logger(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.collection = MetricCollection({"mean_a": MeanMetric(), "acc_b": BinaryAccuracy()})

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        x = batch[0]
        self.log("rows", len(x), reduce_fx="sum")
        self.log("rows_epoch", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", x.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("count", torch.tensor((x[:, 0] > 0).sum().item()), reduce_fx="sum", sync_dist=True)
        self.log_dict({"first": x[:, 0].mean(), "second": x[:, 1].mean()}, on_step=True, on_epoch=True)
        self.accuracy(self(x).sigmoid(), (batch[1] > 0).int())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        prediction = self(batch[0]).sigmoid()
        self.log("val_rows", len(batch[0]), reduce_fx="sum")
        self.log("val_max", batch[0].max(), reduce_fx="max")
        self.log("val_synced", batch[0].mean(), sync_dist=True)
        self.collection["mean_a"].update(prediction)
        self.collection["acc_b"].update(prediction, (batch[1] > 0).int())
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("val_first_batch", batch[0].sum(), reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("in_hook", self.out.weight.detach().sum() if self.out.weight.dim() == 1 else torch.tensor(2.5))

    def on_train_epoch_end(self) -> None:
        self.log("epochs_done", float(self.current_epoch + 1))


def train(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    notes = Notes()
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    trainer = make_trainer(layout, world_size, max_epochs=4, callbacks=[notes, stopping])
    per_rank = 16 // world_size
    trainer.fit(Logger(), loader(48, per_rank), [loader(32, per_rank, seed=1), loader(16, per_rank, seed=2)][:1])
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return notes.metrics, final, {k: float(v) for k, v in trainer.logged_metrics.items()}, trainer.current_epoch


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, LAYOUTS["ddp"]), (2, LAYOUTS["fsdp"]), (4, HYBRID)], ids=["ddp", "fsdp", "hybrid"]
)
def test_every_logged_value_equals_one_process(
    run_distributed: Any, run_single: Any, world_size: int, layout: dict[str, Any]
) -> None:
    want_steps, want_final, want_logged, want_epoch = run_single(train, None, 1)
    for steps, final, logged, epoch in run_distributed(train, layout, world_size, world_size=world_size):
        assert epoch == want_epoch, "EarlyStopping decided otherwise"
        assert len(steps) == len(want_steps)
        for got, want in zip(steps, want_steps, strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert final == pytest.approx(want_final, rel=1e-5, abs=1e-6)
        assert logged == pytest.approx(want_logged, rel=1e-5, abs=1e-6)


def reduce_integers() -> Any:
    import torch.distributed as dist

    trainer = make_trainer({}, 2)
    trainer.fit(Tower(), loader(16, 4))
    rank = dist.get_rank()
    strategy = trainer.strategy
    return (
        float(strategy.reduce(torch.tensor(rank), reduce_op="mean")),
        int(strategy.reduce(torch.tensor(rank + 1), reduce_op="sum")),
        strategy.reduce("text"),
        strategy.broadcast({"rank": rank}, src=1),
        strategy.reduce_boolean_decision(rank == 1, all=True),
        strategy.reduce_boolean_decision(rank == 1, all=False),
        strategy.all_gather(torch.tensor(rank)).tolist(),
    )


def test_reductions_that_lightning_asks_for(run_distributed: Any) -> None:
    expected = (0.5, 3, "text", {"rank": 1}, False, True, [0, 1])
    assert run_distributed(reduce_integers, world_size=2) == [expected, expected]
