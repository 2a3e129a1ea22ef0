"""An unchanged LightningModule against a program written by hand, on gloo ranks of one machine.

Both train the same model on the same data. They take turns in the same processes, some steps each, so that a busy
machine slows both alike; medians of the turns are compared.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pardist import HybridStrategy

LEFT_OUT = 2
"""Steps at the start of a turn that are not timed."""
TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Shape:
    """Of the model and the global batch."""

    vocabulary: int
    length: int
    width: int
    blocks: int
    rows: int


class GPT(nn.Module):
    """What surrounds the blocks is the same in every benchmark."""

    def __init__(self, shape: Shape, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList([block() for _ in range(shape.blocks)])
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitGPT(L.LightningModule):
    """What a user writes."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Times whole training batches, the first ones of a run left out."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= LEFT_OUT:
            self.times.append(time.perf_counter() - self._start)


def loader(shape: Shape, steps: int, data_ranks: int = 1, rank: int | None = None) -> DataLoader[Any]:
    """Returns so many batches for every data rank, the same in every call.

    Args:
        shape: of a batch.
        steps: batches of a data rank.
        data_ranks: how many read different samples.
        rank: which of them this is, for a program that deals samples itself.
    """
    generator = torch.Generator().manual_seed(1)
    rows = shape.rows * steps * data_ranks
    tokens = torch.randint(0, shape.vocabulary, (rows, shape.length + 1), generator=generator)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    sampler = None if rank is None else DistributedSampler(data, num_replicas=data_ranks, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=shape.rows, sampler=sampler)


def trainer(steps: int, clock: Clock, **layout: Any) -> L.Trainer:
    """Returns a quiet Trainer for so many timed steps."""
    return L.Trainer(
        strategy=HybridStrategy(print_plan=False, **layout),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=steps + LEFT_OUT,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def times_of(step: Callable[[Any], Any], batches: list[Any]) -> tuple[list[float], Any]:
    """Returns the seconds of each step of a program that is no Trainer's, and what the last one returned."""
    times: list[float] = []
    result = None
    for index, batch in enumerate(batches):
        start = time.perf_counter()
        result = step(batch)
        if index >= LEFT_OUT:
            times.append(time.perf_counter() - start)
    return times, result


def machine(ranks: int = 2) -> str:
    """Returns what a report says about where it was made."""
    return (
        f"{ranks} gloo processes with one thread each, {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )


def _worker(
    rank: int, ranks: int, store: str, race: Callable[[int, int], Any], turns: int, steps: int, queue: Any
) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="0", NODE_RANK="0")  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = race(turns, steps)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main(
    title: str, race: Callable[[int, int], Any], report: Callable[[Any, int, int], str], sizes: Sequence[int] = (2,)
) -> None:
    """Runs a benchmark as its command line asks.

    Args:
        title: for the help.
        race: called on both ranks with the numbers of turns and of steps in each; a function of a module.
        report: what rank 0 found, turns and steps -> text.
        sizes: numbers of ranks it can run on; each is run unless the command line names one.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, choices=sizes, help="default: all of them, one after another")
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    found = [_run(ranks, race, chosen) for ranks in ([chosen.ranks] if chosen.ranks else sizes)]
    text = "\n".join(report(each, chosen.turns, chosen.steps) for each in found)
    print(text)
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")


def _run(ranks: int, race: Callable[[int, int], Any], chosen: argparse.Namespace) -> Any:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_worker, args=(rank, ranks, store, race, chosen.turns, chosen.steps, queue))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = queue.get(timeout=TIMEOUT_S)
        for process in processes:
            process.join(60)
    return found
