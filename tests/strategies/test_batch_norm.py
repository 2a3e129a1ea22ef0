"""Batch norm on many ranks: synchronised statistics equal one process, local ones are averaged where they are read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pardist.run.buffers import averaged_statistics
from tests.strategies.common import FEATURES, HYBRID, LAYOUTS, Tower, assert_same_weights, loader, make_trainer, weights


class Normed(Tower):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(FEATURES, momentum=momentum)
        self.bn2 = nn.BatchNorm1d(FEATURES, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.bn2(self.bn(x * 3 + 1).relu()))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen = {n: b.clone() for n, b in self.named_buffers()}
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))


def train(layout: dict[str, Any] | None, world_size: int, sync: bool, momentum: float | None) -> Any:
    torch.manual_seed(0)
    module = Normed(momentum)
    trainer = make_trainer(layout, world_size, max_epochs=2, sync_batchnorm=sync, num_sanity_val_steps=0)
    per_rank = 16 // world_size
    trainer.fit(module, loader(64, per_rank), loader(32, per_rank, seed=1))
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    return weights(module), buffers, module.seen, float(trainer.callback_metrics["val_loss"])


def test_synchronised_statistics_equal_one_process(run_distributed: Any, run_single: Any) -> None:
    for momentum in (0.1, None):
        want, want_buffers, _, want_loss = run_single(train, None, 1, False, momentum)
        for layout, world_size in [(LAYOUTS["ddp"], 2), (LAYOUTS["fsdp"], 2), (HYBRID, 4)]:
            for got, buffers, _, loss in run_distributed(
                train, layout, world_size, True, momentum, world_size=world_size
            ):
                assert_same_weights(got, want)
                assert_same_weights(buffers, want_buffers)
                assert abs(loss - want_loss) < 1e-5 * abs(want_loss) + 1e-6


def test_local_statistics_are_averaged_for_evaluation(run_distributed: Any) -> None:
    for layout in (LAYOUTS["ddp"], LAYOUTS["fsdp"]):
        first, second = run_distributed(train, layout, 2, False, 0.1, world_size=2)
        assert_same_weights(first[2], second[2], rtol=0)
        assert first[3] == second[3]


def save_view(layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = Normed()
    trainer = make_trainer(layout, 2, max_steps=3)
    trainer.fit(module, loader(64, 8))
    before = {n: b.clone() for n, b in module.named_buffers()}
    averaged = averaged_statistics(trainer.strategy.parallel_model)
    assert_same_weights({n: b.clone() for n, b in module.named_buffers()}, before, rtol=0)
    return before["bn.running_mean"], averaged["bn.running_mean"]


def test_a_save_reads_averages_without_touching_the_run(run_distributed: Any) -> None:
    (mine, averaged), (other, same) = run_distributed(save_view, LAYOUTS["ddp"], world_size=2)
    assert not torch.equal(mine, other)
    torch.testing.assert_close(averaged, (mine + other) / 2)
    torch.testing.assert_close(averaged, same)
