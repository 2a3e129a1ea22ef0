"""The GPT that several benchmarks train, its data, and what its plan says of its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.gpt.gpt_module import GPT, VOCABULARY
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.plan import state_bytes


class BenchmarkGPT(GPT):
    """The example's GPT with one optimizer group and one logged value."""

    learning_rate = 1e-3

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class RandomRows(Dataset[Tensor]):
    """Random bytes: what they say makes no difference to the time."""

    def __init__(self, count: int, context: int) -> None:
        self._rows = torch.randint(0, VOCABULARY, (count, context + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def quiet(**options: Any) -> dict[str, Any]:
    """Returns arguments of a Trainer that shows and writes nothing."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {**dict.fromkeys(names, False), **options}


def planned_state_bytes(model: ParallelModel) -> int:
    """Returns the bytes of parameters, gradients and Adam's moments on the rank that holds most."""
    assert model.profile is not None
    shards = model.plan.sizes.data_parallel_shard if model.kind == "shard" else 1
    state = state_bytes(model.profile, shards, optimizer_bytes_per_element=8)
    return state.parameters + state.gradients + (state.optimizer or 0)
