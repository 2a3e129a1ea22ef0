"""ParallelThroughput: its figures against counts made by hand."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pardist.callbacks import ParallelThroughput, throughput
from lightning_pardist.callbacks.throughput import Window, report, rows_and_tokens, step_flops
from lightning_pardist.describe import profile_model

WIDTH, HIDDEN, VOCABULARY, LENGTH = 8, 32, 16, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Words(L.LightningModule):
    """Embedding, three blocks, a head: every FLOP is in a matrix product whose size is known."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0.2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def hand_count(rows: int) -> int:
    """FLOPs of one step: each product once forward, and once for either gradient (the embedding is a look-up)."""
    positions = rows * LENGTH
    multiply_adds = positions * (3 * 2 * WIDTH * HIDDEN + WIDTH * VOCABULARY)
    return 3 * 2 * multiply_adds


def test_step_flops_are_those_of_a_hand_count() -> None:
    batch = torch.zeros(4, LENGTH + 1, dtype=torch.long)
    profile = profile_model(Words(), batch)
    assert step_flops(profile, *rows_and_tokens(batch)) == hand_count(4)
    assert step_flops(profile, 10, 10 * (LENGTH + 1)) == hand_count(10)
    assert step_flops(profile, 10, None) == hand_count(10)
    assert step_flops(None, 10, None) is None


def test_rows_and_tokens() -> None:
    ids = torch.zeros(4, 7, dtype=torch.long)
    assert rows_and_tokens(ids) == (4, 28)
    assert rows_and_tokens({"input_ids": ids, "labels": ids, "weight": torch.zeros(4)}) == (4, 28)
    assert rows_and_tokens([torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.long)]) == (5, None)


def test_report_adds_shares_once_and_takes_the_slowest_rank() -> None:
    def window(data_rank: int, rows: int, seconds: float, memory: int) -> Window:
        return Window(
            data_rank=data_rank,
            steps=4,
            seconds=seconds,
            rows=rows,
            tokens=rows * 10,
            flops=rows * 1000.0,
            peak_memory_bytes=memory,
        )

    # Four ranks, two shares: ranks 0 and 1 hold one model together and read the same 30 rows.
    windows = [window(0, 30, 2.0, 7), window(0, 30, 1.9, 8), window(1, 20, 1.8, 5), window(1, 20, 1.7, 6)]
    assert report(windows, peak_flops=50_000.0) == {
        "seconds_per_step": 0.5,
        "samples_per_second": 25.0,
        "tokens_per_second": 250.0,
        "flops_per_step": 12_500.0,
        "flops_per_second": 25_000.0,
        "mfu": 0.125,
        "peak_memory_bytes": 8.0,
    }
    assert "mfu" not in report(windows, peak_flops=None)


def train(batches: int, accumulate: int, world_size: int) -> dict[str, Any]:
    """Trains with 4 rows per rank and micro-batch, a report every 2 steps and a slow validation every 4 batches."""
    exchanges = []
    gather = throughput.gather_objects

    def counted(value: Any, meshes: Any) -> list[Any]:
        exchanges.append(trainer.global_step)
        return gather(value, meshes)

    throughput.gather_objects = counted
    callback = ParallelThroughput(every_n_steps=2, peak_flops=1e9)
    data = torch.randint(0, VOCABULARY, (4 * world_size * batches, LENGTH + 1))
    loader = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    trainer = L.Trainer(
        strategy="pardist_fsdp",
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        val_check_interval=4,
        num_sanity_val_steps=1,
        callbacks=[callback],
        logger=CSVLogger(".", name="logs"),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    try:
        trainer.fit(Words(), loader, DataLoader(data[: 4 * world_size], batch_size=4))  # type: ignore[arg-type]
    finally:
        throughput.gather_objects = gather
    trainer.strategy.barrier()
    with Path("logs/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("throughput/samples_per_second")]
    return {
        "last": callback.last_report,
        "exchanges": exchanges,
        "seconds": time.perf_counter() - started,
        "rows": rows,
        "bar": trainer.progress_bar_metrics,
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_figures_of_a_run_on_two_ranks(run_distributed: Any, accumulate: int) -> None:
    results = run_distributed(train, 9 * accumulate, accumulate, 2, world_size=2)
    first = results[0]
    last = first["last"]
    rows_per_step = 4 * 2 * accumulate
    assert last["samples_per_second"] * last["seconds_per_step"] == pytest.approx(rows_per_step)
    assert last["tokens_per_second"] * last["seconds_per_step"] == pytest.approx(rows_per_step * (LENGTH + 1))
    assert last["flops_per_step"] == hand_count(rows_per_step)
    assert last["flops_per_second"] * last["seconds_per_step"] == pytest.approx(hand_count(rows_per_step))
    assert last["mfu"] == pytest.approx(last["flops_per_second"] / 2e9)
    assert last["peak_memory_bytes"] > 50 * 1024**2
    assert last["seconds_per_step"] < 0.2  # validation, which sleeps as long, is left out
    assert results[1]["last"] == last  # one number for the whole run
    assert first["exchanges"] == [3, 5, 7, 9]  # the first step is left out, then every two
    assert [int(row["step"]) for row in first["rows"]] == [3, 5, 7, 9]
    assert float(first["rows"][-1]["throughput/flops_per_step"]) == hand_count(rows_per_step)
    assert {"throughput/tokens_per_second", "throughput/mfu"} <= set(first["bar"])


def test_one_rank_and_no_peak(run_single: Any) -> None:
    result = run_single(train_alone)
    assert result["flops_per_step"] == hand_count(4)
    assert "mfu" not in result


def train_alone() -> dict[str, float]:
    callback = ParallelThroughput(every_n_steps=1, prog_bar=False)
    trainer = L.Trainer(
        strategy="pardist_hybrid",
        accelerator="cpu",
        devices=1,
        max_steps=3,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = DataLoader(torch.randint(0, VOCABULARY, (40, LENGTH + 1)), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(Words(), loader)
    return callback.last_report


def test_bad_arguments_and_foreign_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be positive"):
        ParallelThroughput(every_n_steps=0)
    with pytest.raises(ValueError, match="peak_flops must be positive"):
        ParallelThroughput(peak_flops=-1.0)
    trainer = L.Trainer(
        strategy="auto",
        accelerator="cpu",
        devices=1,
        callbacks=[ParallelThroughput()],
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(torch.zeros(4, LENGTH + 1, dtype=torch.long))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)lightning_pardist strategy.*Got: SingleDeviceStrategy.*Change:"):
        trainer.fit(Words(), loader)
