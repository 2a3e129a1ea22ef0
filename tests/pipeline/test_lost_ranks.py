"""A rank that dies, or reads other data than its pipeline: the others end soon and say where they were."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import DiagnosisOptions
from lightning_pardist.specs.pipeline_options import PipelineOptions
from tests.bad_input.common import check
from tests.pipeline.test_steps import TWO
from tests.strategies.common import FEATURES, Block, Tower, loader, make_trainer

MOST_SECONDS = 20.0
"""From a kill to the end of the last rank; 0.2 s on an idle machine. The collectives' own bound is half an hour."""


class Dying(Tower):
    """Its process is killed in a block, in the middle of a schedule."""

    def __init__(self, victim: bool, folder: str) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])
        self.victim, self.folder, self.calls = victim, folder, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.calls += 1
        if self.victim and batch_idx == 2 and self.calls % 4 == 2:
            Path(self.folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _train(layout: dict[str, Any], victim: int, folder: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(Path(folder, f"output-{rank}"), "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        pipeline = PipelineOptions(num_microbatches=4)
        trainer = make_trainer({**layout, "pipeline": pipeline}, world_size, num_sanity_val_steps=0)
        try:
            trainer.fit(Dying(rank == victim, folder), loader(160, 8))
        finally:
            Path(folder, f"ended-{rank}").write_text(str(time.time()))


def killed(layout: dict[str, Any], victim: int, folder: str) -> tuple[int | None, bool]:
    """Trains in a child, which may be killed; returns its exit code and whether it had to be ended from here."""
    child = multiprocessing.get_context("fork").Process(target=_train, args=(layout, victim, folder))
    child.start()
    child.join(120)
    is_stuck = child.is_alive()
    if is_stuck:
        child.kill()
        child.join()
    return child.exitcode, is_stuck


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ({"pipeline_parallel_size": 4}, 0),
        ({"pipeline_parallel_size": 4}, 3),
        ({**TWO, "data_parallel_shard_size": 2}, 2),
    ],
    ids=["the first of four stages", "the last of four stages", "a shard of the last of two stages"],
)
def test_a_killed_rank_ends_the_others_soon(
    run_distributed: Any, layout: dict[str, Any], victim: int, tmp_path: Path
) -> None:
    results = run_distributed(killed, layout, victim, str(tmp_path), world_size=4, process_group=False)
    assert results[victim] == (-signal.SIGKILL, False)
    died = float((tmp_path / "killed").read_text())
    for rank in {0, 1, 2, 3} - {victim}:
        text = (tmp_path / f"output-{rank}").read_text()
        assert results[rank] == (1, False), text
        assert float((tmp_path / f"ended-{rank}").read_text()) - died < MOST_SECONDS
        assert f"pardist: RuntimeError: rank {rank} is at pipeline rank" in text, text
        assert "step 2, batch 2, the schedule" in text, text
        if victim == 3:  # what it died of had been through all other stages
            assert ", in or after the " in text and "of micro-batch" in text, text


class Reading(Tower):
    """Every rank reads data of its own."""

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        x = torch.randn(32, FEATURES, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(-1)), batch_size=8)


def fit_reading(diagnosis: DiagnosisOptions | None) -> None:
    make_trainer({**TWO, "diagnosis": diagnosis}, 2, max_steps=2).fit(Reading())


def test_stages_must_read_the_same_batch(run_distributed: Any) -> None:
    check(run_distributed, [(fit_reading, (None,), r"ranks \[0, 1\] of data rank 0 have first batches that differ")])


def compared(layout: dict[str, Any], world_size: int) -> int:
    torch.manual_seed(0)
    trainer = make_trainer({**layout, "diagnosis": DiagnosisOptions(compare_steps=True)}, world_size, max_epochs=2)
    trainer.fit(Uneven(), loader(9 * world_size, 8), loader(20, 8))
    return trainer.global_step


class Uneven(Tower):
    """Three blocks and a dear head: stages of two blocks and of one, which gather and reduce more or less often."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8 * FEATURES), torch.nn.Linear(8 * FEATURES, 1))


def test_debug_mode_compares_stages(run_distributed: Any) -> None:
    assert run_distributed(compared, TWO, 2, world_size=2) == [6, 6]
    sharded = {**TWO, "data_parallel_replicate_size": 1, "data_parallel_shard_size": 2}
    assert run_distributed(compared, sharded, 4, world_size=4) == [6, 6, 6, 6]
