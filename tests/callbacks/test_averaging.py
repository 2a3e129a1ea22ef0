"""Lightning's averages of weights: equal to one process on whole copies, refused at once where ranks hold parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from tests.bad_input.common import check
from tests.strategies.common import Tower, assert_same_weights, loader, make_trainer, weights

CALLBACKS = {
    "average": lambda: WeightAveraging(),
    "moving average": lambda: EMAWeightAveraging(decay=0.7),
    "stochastic": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1),
}


def train(name: str, layout: dict[str, Any] | None, world_size: int, folder: str = "") -> tuple[Any, ...]:
    """Four epochs with a validation after each; with ``folder`` a second Trainer does the last two."""
    torch.manual_seed(0)
    module = Tower()
    data = loader(32, 8 // world_size), loader(16, 8 // world_size, seed=1)
    options: dict[str, Any] = {"max_epochs": 4, "num_sanity_val_steps": 0}
    resume = None
    if folder:
        keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last="link")
        first = make_trainer(
            layout, world_size, callbacks=[CALLBACKS[name](), keep], **{**options, "max_epochs": 2},
            enable_checkpointing=True,
        )  # fmt: skip
        first.fit(module, *data)
        resume = str(Path(folder) / "epoch=1.ckpt")
        torch.manual_seed(7)
        module = Tower()
    trainer = make_trainer(layout, world_size, callbacks=[CALLBACKS[name]()], **options)
    trainer.fit(module, *data, ckpt_path=resume)
    return weights(module), float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("name", list(CALLBACKS))
def test_averages_of_whole_copies_equal_one_process(
    run_distributed: Any, run_single: Any, name: str, tmp_path: Path
) -> None:
    want, loss = run_single(train, name, None, 1)
    for got, other in run_distributed(train, name, {"zero_stage": 0}, 2, world_size=2):
        assert_same_weights(got, want)
        assert other == pytest.approx(loss, rel=1e-5)
    for got, other in run_distributed(train, name, {"zero_stage": 0}, 2, str(tmp_path), world_size=2):
        assert_same_weights(got, want)
        assert other == pytest.approx(loss, rel=1e-5)


def fit(name: str, layout: dict[str, Any]) -> None:
    train(name, layout, 2)


PARTS = ({"pipeline_parallel_size": 2}, {"zero_stage": 1}, {"zero_stage": 3}, {"tensor_parallel_size": 2})


def test_averages_of_parts_are_refused(run_distributed: Any) -> None:
    patterns = {"average": "WeightAveraging", "moving average": "EMAWeightAveraging", "stochastic": "StochasticWeight"}
    check(
        run_distributed,
        [(fit, (name, layout), f"Got: {text}") for layout in PARTS for name, text in patterns.items()],
    )
