"""A loss that one rank cannot give, or that is not finite, is a matter for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.common import HYBRID, LAYOUTS, Tower, assert_same_weights, loader, make_trainer, weights


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """A step without a gradient would move the weights too; Adam would blow up rounding of tiny gradients."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class Faulty(Tower):
    """Returns None (or NaN) at batch ``at`` on ranks in ``ranks``."""

    def __init__(self, at: int, ranks: tuple[int, ...], how: str) -> None:
        super().__init__(optimizer=momentum)
        self.at, self.ranks, self.how = at, ranks, how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        if batch_idx == self.at and self.global_rank in self.ranks:
            return None if self.how == "none" else loss * float("nan")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(
    layout: dict[str, Any] | None, world_size: int, faulty: tuple[Any, ...], accumulate: int, batches: int
) -> Any:
    torch.manual_seed(0)
    module = Faulty(*faulty)
    trainer = make_trainer(layout, world_size, accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(16 * batches, 16 // world_size))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return weights(module), rate, trainer.lr_scheduler_configs[0].scheduler.last_epoch, trainer.global_step


def skip_everywhere(layout: dict[str, Any], world_size: int, how: str, accumulate: int) -> Any:
    layout = {**layout, "on_nonfinite_loss": "skip"}
    return train(layout, world_size, (2, (1,), how), accumulate, 6)


def without_batch(at: int, accumulate: int) -> Any:
    """One process that is never given the dropped batch's gradient: the same steps by hand."""
    torch.manual_seed(0)
    module = Tower(optimizer=momentum)
    optimizer = module.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    steps = 0
    for index, batch in enumerate(loader(96, 16)):
        if index != at:
            (torch.nn.functional.mse_loss(module(batch[0]), batch[1]) / accumulate).backward()
        if (index + 1) % accumulate == 0 and any(p.grad is not None for p in module.parameters()):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
    return weights(module), optimizer.param_groups[0]["lr"], scheduler.last_epoch


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["none", "nan"])
def test_all_ranks_drop_the_step_of_one(run_distributed: Any, run_single: Any, how: str, accumulate: int) -> None:
    want, rate, epochs = run_single(without_batch, 2, accumulate)
    layouts = [(layout, 2) for layout in LAYOUTS.values()] + [(HYBRID, 4)]
    for layout, world_size in layouts:
        for got, got_rate, got_epochs, _ in run_distributed(
            skip_everywhere, layout, world_size, how, accumulate, world_size=world_size
        ):
            assert_same_weights(got, want)
            assert got_rate == pytest.approx(rate)
            assert got_epochs == epochs


def raise_on_nan(layout: dict[str, Any]) -> None:
    train({**layout, "on_nonfinite_loss": "raise"}, 2, (1, (1,), "nan"), 1, 3)


def test_nonfinite_loss_can_stop_all_ranks(run_distributed: Any) -> None:
    errors = run_distributed.errors(raise_on_nan, LAYOUTS["fsdp"], world_size=2)
    assert [type(error) for error in errors] == [FloatingPointError] * 2
    assert all("rank(s) [1]" in str(error) for error in errors)


def propagate(layout: dict[str, Any]) -> Any:
    return train(layout, 2, (1, (1,), "nan"), 1, 3)


def test_by_default_a_nonfinite_loss_does_what_one_process_does(run_distributed: Any) -> None:
    for got, *_ in run_distributed(propagate, LAYOUTS["fsdp"], world_size=2):
        assert all(torch.isnan(value).all() for value in got.values())


def log_by_data(layout: dict[str, Any]) -> Any:
    class Branching(Tower):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            if self.global_rank == 1:
                self.log("only_one", 3.0 + batch_idx)
            return loss

    torch.manual_seed(0)
    trainer = make_trainer(layout, 2)
    trainer.fit(Branching(), loader(32, 8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_names_that_only_one_rank_logs_reach_all(run_distributed: Any) -> None:
    first, second = run_distributed(log_by_data, LAYOUTS["fsdp"], world_size=2)
    assert first == second
    assert first["only_one"] == 4.0
