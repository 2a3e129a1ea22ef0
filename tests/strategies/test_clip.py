"""Clipping is by one norm over everything, as in one process (public behaviour of clip_grad_norm_)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.common import HYBRID, LAYOUTS, Tower, assert_same_weights, loader, make_trainer, weights, whole


class Watched(Tower):
    """Notes the gradients after clipping, and the weights at the end."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.before = {n: whole(p.grad) for n, p in self.named_parameters() if p.grad is not None}
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.after = {n: whole(p.grad) for n, p in self.named_parameters() if p.grad is not None}


def clip(layout: dict[str, Any] | None, world_size: int, algorithm: str, norm_type: float, value: float) -> Any:
    torch.manual_seed(0)
    module = Watched()
    with torch.no_grad():
        module.inp.weight[0] *= 30  # one row dominates one rank's shard
    if layout is not None:
        layout = {**layout, "gradient_clip_norm_type": norm_type}
    trainer = make_trainer(layout, world_size, gradient_clip_val=value, gradient_clip_algorithm=algorithm, max_steps=3)
    trainer.fit(module, loader(64, 16 // world_size))
    return module.before, module.after, weights(module)


def reference(algorithm: str, norm_type: float, value: float) -> Any:
    """One process; Lightning clips by the 2-norm only, so other norms go through torch."""
    torch.manual_seed(0)
    module = Watched()
    with torch.no_grad():
        module.inp.weight[0] *= 30

    def clip_gradients(optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if algorithm == "value":
            nn.utils.clip_grad_value_(module.parameters(), value)
        else:
            nn.utils.clip_grad_norm_(module.parameters(), value, norm_type)

    module.clip_gradients = clip_gradients  # type: ignore[method-assign]
    make_trainer(None, 1, gradient_clip_val=value, max_steps=3).fit(module, loader(64, 16))
    return module.before, module.after, weights(module)


CASES = [("norm", 2.0, 0.1), ("norm", 1.0, 0.1), ("norm", float("inf"), 0.01), ("value", 2.0, 0.005)]


def clip_all(layouts: list[dict[str, Any]], world_size: int) -> list[Any]:
    return [clip(layout, world_size, *case) for layout in layouts for case in CASES]


@pytest.mark.parametrize(("world_size", "layouts"), [(2, list(LAYOUTS.values())), (4, [HYBRID])])
def test_clipped_gradients_equal_one_process(
    run_distributed: Any, run_single: Any, world_size: int, layouts: list[dict[str, Any]]
) -> None:
    expected = [run_single(reference, *case) for case in CASES]
    for rank, results in enumerate(run_distributed(clip_all, layouts, world_size, world_size=world_size)):
        for index, (before, after, final) in enumerate(results):
            want_before, want_after, want_final = expected[index % len(CASES)]
            assert_same_weights(before, want_before)
            assert_same_weights(after, want_after)
            assert_same_weights(final, want_final)
            assert not torch.equal(before["inp.weight"], after["inp.weight"]), f"nothing was clipped (rank {rank})"
