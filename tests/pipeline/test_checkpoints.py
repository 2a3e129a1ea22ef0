"""A checkpoint of a pipeline goes on with any layout, and any layout's with a pipeline (public case 11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pardist.specs.pipeline_options import PipelineOptions
from tests.strategies.common import Block, Tower, decaying, fit_between_epochs, loader, weights

WORLDS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "fsdp 4": ({"zero_stage": 3}, 4),
    "pp 4": ({"pipeline_parallel_size": 4}, 4),
    "pp 2": ({"pipeline_parallel_size": 2}, 2),
    "pp 2, v-shaped": ({"pipeline_parallel_size": 2, "pipeline": PipelineOptions(schedule="zbv_zero_bubble")}, 2),
    "pp 2 x fsdp 2": ({"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}, 4),
}


class Deep(Tower):
    """Two groups with learning rates of their own, a weight tied from the first stage to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.skip = nn.Linear(12, 12, bias=False)
        self.skip.weight = self.inp.weight
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.rows += len(x)
        return self.out(self.skip(x)).squeeze(-1)

    def configure_optimizers(self) -> Any:
        late = list(self.blocks[4].parameters())
        rest = [p for p in self.parameters() if all(p is not q for q in late)]
        optimizer = torch.optim.AdamW([{"params": late, "lr": 0.003}, {"params": rest}], lr=0.01, eps=1e-3)
        return decaying(optimizer)


def run(layout: dict[str, Any], world_size: int, steps: int, save: str | None, resume: str | None) -> Any:
    torch.manual_seed(0 if resume is None else 17)
    module = Deep()
    data = loader(48, 16 // (world_size // layout.get("pipeline_parallel_size", 1)))
    trainer, losses = fit_between_epochs(module, (layout, world_size), data, steps, save, resume)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    owner = trainer.strategy.parallel_model.pipeline if layout else None
    keeps_rows = owner is None or "rows" not in owner.foreign_buffers
    return weights(module), losses, rates, float(module.rows) if keeps_rows else None


def assert_same_where_held(got: dict[str, Tensor], want: dict[str, Tensor]) -> int:
    held = {name: value for name, value in got.items() if not value.isnan().all()}
    for name, value in held.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    return len(held)


@pytest.mark.parametrize("source", ["pp 2 x fsdp 2", "pp 2, v-shaped", "one"])
def test_save_on_one_layout_go_on_with_any(run_distributed: Any, source: str, tmp_path: Path) -> None:
    layout, world_size = WORLDS[source]
    run_distributed(run, layout, world_size, 3, str(tmp_path / "a"), None, world_size=world_size)
    want, losses, rates, rows = run_distributed(run, {}, 1, 6, None, None, world_size=1)[0]
    targets = [name for name in WORLDS if name.startswith("pp")] if source == "one" else list(WORLDS)
    for name in targets:
        other, size = WORLDS[name]
        results = run_distributed(run, other, size, 6, None, str(tmp_path / "a.ckpt"), world_size=size)
        counted = [result[3] for result in results if result[3] is not None]
        assert counted, "no stage keeps the buffer"
        for final, tail, final_rates, _ in results:
            assert tail == pytest.approx(losses[3:], rel=1e-6), name
            assert final_rates == pytest.approx(rates), name
            assert assert_same_where_held(final, want) > 5
        if "fsdp" not in name and "fsdp" not in source:  # a buffer counts the rows of its own data rank
            assert set(counted) == {rows}, name
