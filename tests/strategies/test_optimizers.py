"""Optimizers over sharded parameters: implementations, groups, schedulers, callbacks that unfreeze, offloading."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from torch import Tensor, nn

from tests.strategies.common import (
    FEATURES,
    HYBRID,
    LAYOUTS,
    Tower,
    assert_same_weights,
    loader,
    make_trainer,
    weights,
)

ADAM = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Scaled(Tower):
    """Has a parameter of no dim, as CLIP's logit_scale: the odd one in an optimizer group."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer=optimizer)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()

    def configure_optimizers(self) -> Any:
        decay = [p for n, p in self.named_parameters() if p.dim() > 1]
        rest = [p for n, p in self.named_parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = self.make_optimizer(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def adam(layout: dict[str, Any] | None, world_size: int, options: dict[str, bool]) -> Any:
    torch.manual_seed(0)
    # amsgrad and a large eps keep Adam from blowing up the rounding of tiny gradients.
    module = Scaled(partial(torch.optim.AdamW, eps=1e-3, amsgrad=True, **options))
    trainer = make_trainer(layout, world_size, max_steps=5, gradient_clip_val=0.5)
    trainer.fit(module, loader(96, 16 // world_size))
    return weights(module), [group["lr"] for group in trainer.optimizers[0].param_groups]


def adam_everywhere(layouts: list[dict[str, Any]], world_size: int) -> list[Any]:
    return [adam(layout, world_size, options) for layout in layouts for options in ADAM.values()]


@pytest.mark.parametrize(("world_size", "layouts"), [(2, list(LAYOUTS.values())), (4, [HYBRID])])
def test_every_implementation_of_adam_steps_as_one_process(
    run_distributed: Any, run_single: Any, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    want, want_rates = run_single(adam, None, 1, ADAM["for-loop"])
    for results in run_distributed(adam_everywhere, layouts, world_size, world_size=world_size):
        for got, rates in results:
            assert_same_weights(got, want)
            assert rates == pytest.approx(want_rates)


class Finetuned(Tower):
    """Its backbone is frozen at first; the callback unfreezes it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def finetune(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Finetuned()
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False)
    make_trainer(layout, world_size, max_epochs=3, callbacks=[callback]).fit(module, loader(48, 16 // world_size))
    return weights(module)


def finetune_everywhere(layouts: list[dict[str, Any]], world_size: int) -> list[Any]:
    return [finetune(layout, world_size) for layout in layouts]


@pytest.mark.parametrize(("world_size", "layouts"), [(2, list(LAYOUTS.values())), (4, [HYBRID])])
def test_a_backbone_unfrozen_later_trains_on_all_ranks(
    run_distributed: Any, run_single: Any, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    want = run_single(finetune, None, 1)
    for results in run_distributed(finetune_everywhere, layouts, world_size, world_size=world_size):
        for got in results:
            assert_same_weights(got, want)


def offload(layout: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    module = Tower()
    trainer = make_trainer(layout, 1 if layout is None else 2, max_steps=4, gradient_clip_val=0.1)
    trainer.fit(module, loader(64, 16 if layout is None else 8))
    return weights(module)


def test_cpu_offload_clips_and_steps_as_one_process(run_distributed: Any, run_single: Any) -> None:
    layout = {"zero_stage": 3, "cpu_offload": True}
    for got in run_distributed(offload, layout, world_size=2):
        assert_same_weights(got, run_single(offload, None))


def scheduled(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Tower()
    callback = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    # Five batches an epoch: windows of 3 and 2 end with a partial one.
    make_trainer(layout, world_size, max_epochs=3, callbacks=[callback]).fit(module, loader(80, 16 // world_size))
    return weights(module)


def scheduled_everywhere(layouts: list[dict[str, Any]], world_size: int) -> list[Any]:
    return [scheduled(layout, world_size) for layout in layouts]


@pytest.mark.parametrize(("world_size", "layouts"), [(2, list(LAYOUTS.values())), (4, [HYBRID])])
def test_accumulation_windows_partial_ones_included(
    run_distributed: Any, run_single: Any, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    want = run_single(scheduled, None, 1)
    for results in run_distributed(scheduled_everywhere, layouts, world_size, world_size=world_size):
        for got in results:
            assert_same_weights(got, want)


class Stale(Tower):
    """Collects its parameters too early."""

    def __init__(self) -> None:
        super().__init__()
        self.early = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.early, lr=0.1)


def train_stale() -> None:
    make_trainer(LAYOUTS["fsdp"], 2).fit(Stale(), loader(16, 4))


def test_parameters_collected_before_sharding_are_refused(run_distributed: Any) -> None:
    errors = run_distributed.errors(train_stale, world_size=2)
    assert all(isinstance(error, ValueError) and "configure_optimizers" in str(error) for error in errors)
