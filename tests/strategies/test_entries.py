"""One Trainer, many entries; modules built in configure_model or on meta; evaluation that leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.common import (
    HYBRID,
    LAYOUTS,
    Block,
    Tower,
    assert_same_weights,
    loader,
    make_trainer,
    weights,
)


class Late(Tower):
    """Builds its layers in configure_model, which Lightning calls once per entry."""

    def __init__(self) -> None:
        super().__init__()
        del self.inp, self.blocks, self.out
        self.inp: nn.Module | None = None
        self.calls = 0

    def configure_model(self) -> None:
        self.calls += 1
        if self.inp is None:
            built = Tower()
            self.inp, self.blocks, self.out = built.inp, built.blocks, built.out


def all_entries(layout: dict[str, Any] | None, world_size: int, late: bool) -> Any:
    torch.manual_seed(0)
    module = Late() if late else Tower()
    trainer = make_trainer(layout, world_size, max_steps=2)
    per_rank = 16 // world_size
    trainer.fit(module, loader(64, per_rank), loader(32, per_rank, seed=1))
    first = weights(module)
    validated = trainer.validate(module, loader(32, per_rank, seed=1), verbose=False)
    tested = trainer.test(module, loader(32, per_rank, seed=2), verbose=False)
    predicted = trainer.predict(module, loader(32, per_rank, seed=3))
    assert predicted is not None
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader(64, per_rank), loader(32, per_rank, seed=1))
    # A second Trainer of the same layout goes on with the same module.
    make_trainer(layout, world_size, max_steps=1).fit(module, loader(64, per_rank))
    return first, weights(module), validated, tested, torch.cat(predicted)


def every_layout(layouts: list[dict[str, Any]], world_size: int, late: bool) -> list[Any]:
    return [all_entries(layout, world_size, late) for layout in layouts]


@pytest.mark.parametrize(
    ("world_size", "layouts"), [(2, [LAYOUTS["ddp"], LAYOUTS["zero2"], LAYOUTS["fsdp"]]), (4, [HYBRID])]
)
@pytest.mark.parametrize("late", [False, True])
def test_fit_validate_test_predict_fit(
    run_distributed: Any, run_single: Any, world_size: int, layouts: list[dict[str, Any]], late: bool
) -> None:
    first, final, validated, tested, predicted = run_single(all_entries, None, 1, late)
    ranks = run_distributed(every_layout, layouts, world_size, late, world_size=world_size)
    for results in ranks:
        for got in results:
            assert_same_weights(got[0], first)
            assert_same_weights(got[1], final)
            assert got[2][0] == pytest.approx(validated[0], rel=1e-5)
            assert got[3][0] == pytest.approx(tested[0], rel=1e-5)
    for index in range(len(layouts)):
        # Dealt like cards: sample i went to rank i mod size.
        dealt = torch.stack([results[index][4] for results in ranks], dim=1).flatten()
        torch.testing.assert_close(dealt, predicted, rtol=1e-5, atol=1e-6)


def evaluate_under_inference_mode(layout: dict[str, Any], world_size: int) -> Any:
    """What CPU hides: on NCCL Lightning evaluates under inference_mode, before the first training step too."""
    torch.manual_seed(0)
    module = Tower()
    trainer = make_trainer(layout, world_size, max_steps=2)
    seen: list[bool] = []
    original = Tower.validation_step

    def validation_step(self: Tower, *args: Any) -> None:
        seen.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        original(self, *args)

    module.validation_step = validation_step.__get__(module)  # type: ignore[method-assign]
    step = trainer.strategy.validation_step

    def under_inference_mode(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return step(*args, **kwargs)

    trainer.strategy.validation_step = under_inference_mode  # type: ignore[method-assign]
    trainer.fit(module, loader(32, 16 // world_size), loader(32, 16 // world_size))
    assert seen
    assert not any(seen)
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert not any(loop.inference_mode for loop in loops)
    return weights(module)


def test_inference_mode_never_reaches_a_sharded_module(run_distributed: Any) -> None:
    for layout in (LAYOUTS["fsdp"], LAYOUTS["zero2"]):
        results = run_distributed(evaluate_under_inference_mode, layout, 2, world_size=2)
        assert_same_weights(results[0], results[1], rtol=0)


class OnMeta(Tower):
    """Layers on the meta device: whole weights never exist together."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.inp = nn.Linear(12, 12)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.out = nn.Linear(12, 1)
            self.out.weight = nn.Parameter(self.out.weight.detach())
            self.blocks[2].up.bias = self.blocks[1].up.bias  # a tie that must survive


def start_on_meta(layout: dict[str, Any], world_size: int) -> Any:
    torch.manual_seed(5)  # the one thing that all layouts have in common
    module = OnMeta()
    trainer = make_trainer(layout, world_size, max_steps=0)
    trainer.fit(module, loader(32, 16 // world_size))
    assert module.blocks[2].up.bias is module.blocks[1].up.bias
    return weights(module)


def test_meta_modules_start_alike_on_every_layout(run_distributed: Any) -> None:
    starts = [run_distributed(start_on_meta, layout, 2, world_size=2)[0] for layout in LAYOUTS.values()]
    starts.append(run_distributed(start_on_meta, HYBRID, 4, world_size=4)[3])
    for start in starts[1:]:
        assert_same_weights(start, starts[0], rtol=0)
    assert all(torch.isfinite(value).all() for value in starts[0].values())
    assert starts[0]["inp.weight"].std() > 0.05


def start_with_own_seed(layout: dict[str, Any], world_size: int) -> Any:
    module = Tower()  # the pool seeds every rank differently
    drawn = module.inp.weight.detach().clone()
    make_trainer(layout, world_size, max_steps=0).fit(module, loader(32, 16 // world_size))
    return drawn, weights(module)


@pytest.mark.parametrize(("world_size", "layouts"), [(2, list(LAYOUTS.values())), (4, [HYBRID])])
def test_replicas_start_from_the_bits_of_rank_0(
    run_distributed: Any, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    for layout in layouts:
        results = run_distributed(start_with_own_seed, layout, world_size, world_size=world_size)
        drawn = [result[0] for result in results]
        assert not torch.equal(drawn[0], drawn[1]), "the ranks were meant to draw different weights"
        for _, start in results:
            assert torch.equal(start["inp.weight"], drawn[0])
            assert_same_weights(start, results[0][1], rtol=0)
