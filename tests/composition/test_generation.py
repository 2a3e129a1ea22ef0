"""Text written in a validation step, by transformers' ``generate`` with its cache and by a loop of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategies.common import make_trainer
from tests.support.marks import NEEDS_TRANSFORMERS
from tests.support.modules import Llama
from tests.support.pool import WorkerPool

pytestmark = [pytest.mark.timeout(300), *NEEDS_TRANSFORMERS]


class Writing(Llama):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.written: list[list[int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        start = batch[0][:, :4]
        self.written += (self.by_cache(start) if self.how == "generate" else self.by_hand(start)).tolist()

    def by_cache(self, tokens: Tensor) -> Tensor:
        return self.model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)

    def by_hand(self, tokens: Tensor) -> Tensor:
        for _ in range(5):
            chosen = self.model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens


def write(how: str, layout: dict[str, Any] | None) -> list[list[int]]:
    torch.manual_seed(0)
    module = Writing(how)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rows = 8 // (ranks if layout and "data_parallel_shard_size" in layout else 1)
    data = [DataLoader(module.dataset(count, seed=1), batch_size=rows) for count in (16, 8)]
    make_trainer(layout, ranks, num_sanity_val_steps=0).fit(module, *data)
    return module.written


@pytest.mark.parametrize("how", ["generate", "by hand"])
def test_texts_of_one_process(run_distributed: WorkerPool, run_single: Any, how: str) -> None:
    want = run_single(write, how, None)
    assert len(want) == 8 and len(want[0]) == 9
    for written in run_distributed(write, how, {"tensor_parallel_size": 2}, world_size=2):
        assert written == want
    parts = run_distributed(write, how, {"data_parallel_shard_size": 2}, world_size=2)
    assert sorted(text for part in parts for text in part) == sorted(want)


@pytest.mark.parametrize("how", ["generate", "by hand"])
def test_stages_run_blocks_once_a_step(run_distributed: WorkerPool, how: str) -> None:
    for error in run_distributed.errors(write, how, {"pipeline_parallel_size": 2}, world_size=2):
        assert "was called twice in this step" in str(error) or "calls model.model.layers.0" in str(error)
