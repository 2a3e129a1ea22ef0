"""Small modules and batches at random: a pipeline of two equals one process, or is refused before the first step.

30 of them in every run; ``PARDIST_LONG_TESTS=1`` tries 200.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist.specs.pipeline_options import SCHEDULES, PipelineOptions
from tests.strategies.common import make_trainer, weights
from tests.support.pool import WorkerPool

PER_CALL = 10
CALLS = 20 if os.environ.get("PARDIST_LONG_TESTS") else 3
KINDS = ("plain", "tuple", "in place", "wide", "view", "kept")


class RandomBlock(nn.Module):
    """One of several ways to write a block."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        inner = 3 * width if kind == "wide" else width
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Any:
        y = self.down(self.up(x).tanh())
        if gain is not None:
            y = y * gain
        if self.kind == "in place":
            y += x
            return y
        if self.kind == "tuple":
            return x + y, gain, {"last": y}
        if self.kind == "view":
            return (x + y).unsqueeze(1).squeeze(1)
        if self.kind == "kept":
            self.state = x + y
            return self.state * 1.5
        return x + y


class RandomModule(L.LightningModule):
    """Built from a specification; the last block's kind may differ from the others'."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        width = spec["width"]
        self.spec = spec
        self.inp, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList([RandomBlock(kind, width) for kind in spec["kinds"]])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in spec["kinds"]]) if spec["norms"] else None
        if spec["tied"]:
            self.out.weight = self.inp.weight
        if spec["shared"] and (spec["kinds"][0] == "wide") == (spec["kinds"][-1] == "wide"):
            self.blocks[-1].up = self.blocks[0].up
        if spec["frozen"]:
            self.blocks[0].requires_grad_(False)
            self.inp.requires_grad_(False)
        if spec["head"]:
            self.register_parameter("gain", nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.inp(x)
        gain = self.gain.sigmoid() * start.mean(-1, keepdim=True) if self.spec["head"] else None
        states = []
        for index, block in enumerate(self.blocks):
            if self.norms is not None:
                x = self.norms[index](x)
            x = block(x) if gain is None else block(x, gain=gain)
            if isinstance(x, tuple):
                x = x[0] + 0.1 * x[2]["last"]
            states.append(x)
        if self.spec["skip"]:
            x = x + start
        if self.spec["states"]:
            x = x + torch.stack(states).mean(0)
        if self.spec["peeks"] and hasattr(self.blocks[0], "state"):
            x = x + self.blocks[0].state
        return self.out(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        if self.spec["penalty"]:
            loss = loss + 0.01 * self.blocks[0].down.weight.square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


FLAGS = ("norms", "tied", "shared", "frozen", "head", "skip", "states", "peeks", "penalty")
SPECS = st.fixed_dictionaries(
    {
        "width": st.integers(2, 5),
        "kinds": st.lists(st.sampled_from(KINDS), min_size=2, max_size=6),
        "rows": st.integers(1, 9),
        "batch": st.integers(1, 6),
        "schedule": st.sampled_from(SCHEDULES),
        "microbatches": st.one_of(st.just("auto"), st.just("auto"), st.integers(1, 6)),
        "accumulate": st.integers(1, 2),
        **{flag: st.booleans() for flag in FLAGS},
    }
)


def train(spec: dict[str, Any], layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(1)
    module = RandomModule(spec)
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(spec["rows"], spec["width"], generator=generator) for _ in range(2)]
    try:
        trainer = make_trainer(
            layout, world_size, max_epochs=2, accumulate_grad_batches=spec["accumulate"], gradient_clip_val=0.5
        )
        trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=spec["batch"]))
    except ValueError as error:
        if trainer.global_step:
            raise AssertionError("refused after a step") from error
        return str(error)
    return float(trainer.callback_metrics["loss"]), weights(module)


def train_all(specs: list[dict[str, Any]], is_pipeline: bool, world_size: int) -> list[Any]:
    found = []
    for spec in specs:
        options = PipelineOptions(schedule=spec["schedule"], num_microbatches=spec["microbatches"])
        layout = {"pipeline_parallel_size": 2, "pipeline": options} if is_pipeline else None
        found.append(train(spec, layout, world_size))
    return found


REASONS = ("Every stage", "The schedule must be able", "What crosses a cut", "A batch must have enough rows")


@pytest.mark.timeout(3000 if CALLS > 3 else 300)
@pytest.mark.filterwarnings("ignore")
def test_random_modules_equal_one_process_or_are_refused(run_distributed: WorkerPool, run_single: Any) -> None:
    refused = []

    @settings(
        max_examples=CALLS, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(specs=st.lists(SPECS, min_size=PER_CALL, max_size=PER_CALL))
    def check(specs: list[dict[str, Any]]) -> None:
        wanted = run_single(train_all, specs, False, 1, timeout=120)
        results = run_distributed(train_all, specs, True, 2, world_size=2, timeout=250)
        for spec, want, *got in zip(specs, wanted, *results, strict=True):
            if isinstance(got[0], str):
                assert got[0] == got[1], f"ranks differ: {spec}"
                assert got[0].startswith(REASONS), f"no reason: {got[0]} for {spec}"
                refused.append(spec)
                continue
            for loss, held in got:
                assert loss == pytest.approx(want[0], rel=1e-5, abs=1e-6), spec
                for name, value in held.items():
                    if not value.isnan().all():
                        torch.testing.assert_close(value, want[1][name], rtol=1e-5, atol=1e-6, msg=f"{name}: {spec}")

    check()
    assert len(refused) < 0.8 * CALLS * PER_CALL, "hardly anything was run"
