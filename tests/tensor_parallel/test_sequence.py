"""Modules for which sequence parallel is wrong are found at set-up, with the module and the reason."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pardist import HybridStrategy, TensorOptions
from tests.support.pool import WorkerPool
from tests.tensor_parallel.models import Trained, dataset
from tests.tensor_plan import models as parts


class Mixing(nn.Module):
    """Attention, and a convolution along the sequence between the regions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = parts.FusedAttention("split"), parts.MLP()
        self.norm = nn.LayerNorm(parts.WIDTH)
        self.shift = nn.Conv1d(parts.WIDTH, parts.WIDTH, 3, padding=1, groups=parts.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + self.shift(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(x)


class Averaging(parts.Block):
    """Its own code looks at all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


class Statistics(parts.Block):
    """Batch norm over rows and positions, which only training shows."""

    def __init__(self) -> None:
        super().__init__(parts.FusedAttention("split"), parts.MLP())
        self.batch_norm = nn.BatchNorm1d(parts.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


class Positions(parts.Block):
    """Knows how long the sequence is."""

    def __init__(self) -> None:
        super().__init__(parts.FusedAttention("split"), parts.MLP())
        self.positions = nn.Parameter(torch.randn(parts.LENGTH, parts.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions)


class Looping(parts.GPT):
    """Looks at all positions between its blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
            x = x - x.mean(1, keepdim=True)
        return self.head(self.norm(x))


class Scaling(parts.GPT):
    """Between its blocks it treats every position alike: nothing to refuse."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = F.dropout(block(x), 0.0) * 0.5
        return self.head(self.norm(x))


class Net(Trained):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.scored(self.net(batch[0]), batch[1])


def blocks(kind: type[nn.Module]) -> list[nn.Module]:
    made = (lambda: kind(parts.FusedAttention("split"), parts.MLP())) if kind is Averaging else kind
    return [made() for _ in range(2)]


MODULES: dict[str, Any] = {
    "mixing": lambda: parts.GPT(blocks(Mixing)),
    "averaging": lambda: parts.GPT(blocks(Averaging)),
    "statistics": lambda: parts.GPT(blocks(Statistics)),
    "positions": lambda: parts.GPT(blocks(Positions)),
    "looping": lambda: Looping([parts.Block(parts.FusedAttention("split")) for _ in range(2)]),
    "kept": lambda: parts.GPT([parts.Block(parts.FusedAttention("split")) for _ in range(2)]),
    "scaling": lambda: Scaling([parts.Block(parts.FusedAttention("split")) for _ in range(2)]),
}
PLANS = {"kept": {"net.blocks.*.attention.*": "replicate"}}


def train(name: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    options = TensorOptions(sequence_parallel=True, plan=PLANS.get(name))
    strategy = HybridStrategy(tensor_parallel_size=2, tensor=options, print_plan=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(MODULES[name]()), DataLoader(dataset(), batch_size=8))
    assert strategy.plan is not None and strategy.plan.tensor is not None
    return strategy.plan.tensor.notes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixing", r"Got: net\.blocks\.0: .*shift \(Conv1d\) is the first to give other values"),
        ("averaging", r"Got: net\.blocks\.0: output 0 is off by"),
        ("statistics", r"Got: net\.blocks\.0\.batch_norm \(BatchNorm1d\) takes statistics over positions"),
        ("positions", r"Got: net\.blocks\.0: RuntimeError: The size of tensor a .*at .*test_sequence\.py.*x \+ self"),
        ("looping", r"Got: mean, called between the blocks by net\n"),
        ("kept", r"Got: net\.blocks\.0: .*attention\.out \(Linear\) is the first to give other values"),
    ],
)
def test_what_looks_at_more_than_a_position_is_refused(run_distributed: WorkerPool, name: str, words: str) -> None:
    errors = run_distributed.errors(train, name, world_size=2)
    with pytest.raises(ValueError, match=rf"(?s)must treat every position alone.*{words}.*From.*Change: .*=False"):
        raise errors[0]
    assert {str(error) for error in errors} == {str(errors[0])}


def test_the_notes_tell_what_was_tried(run_distributed: WorkerPool) -> None:
    for notes in run_distributed(train, "scaling", world_size=2):
        assert "1 kind(s) of block on shares of the sequence tried" in notes[-1]
