"""Ranks that are missing, different or stuck are named, and every wait ends."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DiagnosisOptions
from lightning_pardist.run.fingerprint import RanksDifferError, checksum
from lightning_pardist.run.meeting import RanksMissingError, meet
from tests.strategies.common import HYBRID, Tower, loader, make_trainer
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(200)


def _come(port: int, absent: int, timeout_s: float) -> float:
    started = time.monotonic()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank != absent:
        meet("127.0.0.1", port, rank=rank, world_size=world_size, timeout_s=timeout_s)
    else:
        time.sleep(timeout_s)  # alive, but elsewhere
    return time.monotonic() - started


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("absent", [0, 2])
def test_the_missing_rank_is_named_by_those_that_came(run_distributed: WorkerPool, absent: int) -> None:
    errors = run_distributed.errors(_come, _free_port(), absent, 3.0, world_size=3, process_group=False)
    for rank, error in enumerate(errors):
        if rank == absent:
            assert error is None
            continue
        assert isinstance(error, RanksMissingError)
        assert f"rank(s) {absent} did not come" in str(error)


def test_all_that_come_meet(run_distributed: WorkerPool) -> None:
    assert max(run_distributed(_come, _free_port(), -1, 20.0, world_size=3, process_group=False)) < 15


class _OwnWay(Tower):
    """Rank 1 starts a collective of its own after the second step; it would meet another one of rank 0."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and dist.get_rank() == 1:
            group = self.device_mesh["data_parallel_shard"].get_group()
            self.pending = dist.all_reduce(torch.zeros(1), group=group, async_op=True)


def _compare(kind: str) -> None:
    diagnosis = DiagnosisOptions(compare_steps=True)
    # Two copies, so that the shards' group is none that ranks agree by between two steps.
    trainer = make_trainer({**HYBRID, "diagnosis": diagnosis}, dist.get_world_size(), max_steps=4)
    trainer.fit(Tower() if kind == "same" else _OwnWay(), loader(64, 4))


def test_equal_steps_pass(run_distributed: WorkerPool) -> None:
    run_distributed(_compare, "same", world_size=4)


def test_a_collective_of_one_rank_is_named(run_distributed: WorkerPool) -> None:
    for error in run_distributed.errors(_compare, "own way", world_size=4, timeout=100.0):
        assert isinstance(error, RanksDifferError), error
        assert re.search(r"rank 1 has started \d+ collectives on data_parallel_shard, rank 0 \d+", str(error))


def test_checksums_tell_batches_apart() -> None:
    data = DataLoader(TensorDataset(torch.arange(8.0).view(4, 2)), batch_size=2)
    first, second = data
    assert checksum(first) == checksum([first[0].clone()]) != checksum(second)
    assert checksum({"a": "x", "b": first}) != checksum({"a": "y", "b": first})
    assert checksum(torch.zeros(2, dtype=torch.bfloat16)) != checksum(torch.ones(2, dtype=torch.bfloat16))


class _Sleepy(Tower):
    """Rank 1 stops in the second block of the second step."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 1 and dist.is_initialized() and dist.get_rank() == 1:
            self.blocks[1].register_forward_pre_hook(lambda module, args: time.sleep(8))
        return super().training_step(batch, batch_idx)


def _stuck() -> str:
    import contextlib
    import io
    from datetime import timedelta

    said = io.StringIO()
    layout = {
        "zero_stage": 3,
        "data_parallel_replicate_size": 1,
        "diagnosis": DiagnosisOptions(stuck_after_s=1.0),
        "timeout": timedelta(seconds=4),
    }
    trainer = make_trainer(layout, dist.get_world_size(), max_steps=4)
    with contextlib.redirect_stderr(said), contextlib.suppress(Exception):
        trainer.fit(_Sleepy(), loader(32, 4))
    return said.getvalue()


def test_a_stuck_rank_says_where_it_is(run_distributed: WorkerPool) -> None:
    for rank, text in enumerate(run_distributed(_stuck, timeout=100.0)):
        assert re.search(
            rf"no progress for \d+ s: rank {rank} is at step 1, batch 1, forward, in or after blocks\.1", text
        )
        assert re.search(rf"Error: rank {rank} is at step 1, batch 1", text)  # and when the collective has failed
