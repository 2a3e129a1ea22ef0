"""SIGTERM to one rank ends all of them at the same step (public case 12)."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from tests.strategies.common import HYBRID, LAYOUTS, Tower, loader, make_trainer


class Terminated(Tower):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss


def terminate(layout: dict[str, Any], world_size: int, rank: int) -> Any:
    trainer = make_trainer(layout, world_size)
    try:
        copies = layout.get("pipeline_parallel_size", 1) * layout.get("tensor_parallel_size", 1)
        trainer.fit(Terminated(rank), loader(96, 16 * copies // world_size))
    except SIGTERMException:
        return "stopped", trainer.global_step
    return "went on", trainer.global_step


def test_a_signal_to_any_rank_stops_all_ranks_at_one_step(run_distributed: Any) -> None:
    tensor, pipeline = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
    cases = [(LAYOUTS["ddp"], 2, 1), (LAYOUTS["fsdp"], 2, 0), (tensor, 2, 1), (pipeline, 2, 1), (HYBRID, 4, 3)]
    for layout, world_size, rank in [*cases, ({**tensor, **pipeline}, 4, 3)]:
        results = run_distributed(terminate, layout, world_size, rank, world_size=world_size)
        assert results == [("stopped", 3)] * world_size
