"""Step time of a pipeline of two processes: an unchanged LightningModule in a Trainer against a hand-written program.

The hand-written program is what torch's tutorial shows: stages split by hand, ``PipelineStage``, a schedule, an
optimizer; no Lightning, no logging. Both train the same model on the same data on two gloo ranks. They take turns in
the same processes, some steps each, so that a busy machine slows both alike; medians of the turns are compared. Beside
it the measured idle share.

Then the balance of stages with a heavy head: what the planner counts and what a step measures, split by cost and by
number of blocks.

    python benchmarks/pipeline.py [--turns 6] [--steps 8] [--write benchmarks/results/pipeline.md]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy, PipelineOptions

VOCABULARY, LENGTH, WIDTH, BLOCKS, ROWS, MICROBATCHES = 512, 64, 192, 8, 16, 8
HEAVY = 4 * 1216  # two blocks' cost: 12 WIDTH^2 weights and the attention's products each
SCHEDULES = {"1f1b": (Schedule1F1B, 1), "interleaved_1f1b": (ScheduleInterleaved1F1B, 2)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitGPT(L.LightningModule):
    """What a user writes."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.model = GPT(vocabulary)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class HandStage(nn.Module):
    """A stage written by hand."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        self.first, self.last = blocks.start == 0, blocks.stop == BLOCKS
        if self.first:
            self.embedding, self.positions = model.embedding, model.positions
        self.blocks = nn.ModuleList([model.blocks[i] for i in blocks])
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


class HandWritten:
    """Stages, schedule and optimizer of one rank."""

    def __init__(self, schedule: str, splits: list[range]) -> None:
        torch.manual_seed(0)
        model, rank = GPT(), dist.get_rank()
        kind, per_rank = SCHEDULES[schedule]
        own = range(rank, 2 * per_rank, 2)
        self.stages = [PipelineStage(HandStage(model, splits[i]), i, 2 * per_rank, torch.device("cpu")) for i in own]
        stages: Any = self.stages[0] if per_rank == 1 else self.stages
        self.schedule = kind(stages, MICROBATCHES, loss_fn=self.loss)
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        losses: list[Tensor] = []
        args = (batch[0],) if self.has_first else ()
        self.schedule.step(*args, target=batch[1] if self.has_last else None, losses=losses, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Clock(L.Callback):
    """Times whole training batches, the first two of a run left out."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2:
            self.times.append(time.perf_counter() - self._start)


def data(rows: int) -> TensorDataset:
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def trainer(schedule: str, steps: int, clock: Clock, timeline: str | None = None, split: Any = "auto") -> L.Trainer:
    options = PipelineOptions(schedule=schedule, num_microbatches=MICROBATCHES, timeline=timeline, split=split)
    return L.Trainer(
        strategy=HybridStrategy(pipeline_parallel_size=2, pipeline=options, print_plan=False),
        accelerator="cpu", devices=2, max_steps=steps + 2, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def race(schedule: str, turns: int, steps: int) -> dict[str, Any]:
    clock = Clock()
    torch.manual_seed(0)
    ours = LitGPT()
    run = trainer(schedule, 1, clock)
    run.fit(ours, DataLoader(data(ROWS * 4), batch_size=ROWS))
    plan = run.strategy.plan.pipeline
    hand = HandWritten(schedule, [range(stage.first, stage.stop) for stage in plan.stages])
    batches = list(DataLoader(data(ROWS * (steps + 2)), batch_size=ROWS))
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    for _ in range(turns):
        for index, batch in enumerate(batches):
            start = time.perf_counter()
            hand.step(batch)
            if index >= 2:
                times["hand"].append(time.perf_counter() - start)
        clock.times.clear()
        trainer(schedule, steps, clock).fit(ours, DataLoader(data(ROWS * (steps + 2)), batch_size=ROWS))
        times["ours"] += clock.times
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = {name: min(found) for name, found in times.items()}
    events, _ = timeline(schedule, LitGPT())
    idle = 0.0
    if events:
        length = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        idle = 1 - sum(e["dur"] for e in events) / (2 * length)
    return {"schedule": schedule, "median": medians, "best": best, "idle": idle, "foretold": plan.idle_share,
            "balance": plan.balance}  # fmt: skip


def timeline(schedule: str, module: LitGPT, split: Any = "auto") -> tuple[list[dict[str, Any]], Any]:
    """Returns the actions of one step with their times, on rank 0, and the plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step.json")
        run = trainer(schedule, 4, Clock(), path, split)
        run.fit(module, DataLoader(data(ROWS * 6), batch_size=ROWS))
        events = json.loads(Path(path).read_text())["traceEvents"] if dist.get_rank() == 0 else []
    return events, run.strategy.plan.pipeline


def balance(turns: int) -> list[dict[str, Any]]:
    """Dearest stage over the mean, counted and measured, for a vocabulary of two blocks' cost."""
    rows = []
    for name, split in (("by cost", "auto"), ("by number of blocks", [BLOCKS // 2, BLOCKS // 2])):
        measured, plan = [], None
        for _ in range(turns):
            events, plan = timeline("1f1b", LitGPT(HEAVY), split)
            busy = [sum(e["dur"] for e in events if e["name"][0] == str(stage)) for stage in range(2)]
            measured.append(2 * max(busy) / max(sum(busy), 1))
        blocks = [len(stage.blocks) for stage in plan.stages]
        rows.append({"split": name, "blocks": blocks, "counted": plan.balance, "measured": statistics.median(measured)})
    return rows


def worker(rank: int, store: str, turns: int, steps: int, queue: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="0", NODE_RANK="0")  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = [race(schedule, turns, steps) for schedule in SCHEDULES], balance(turns)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def report(found: list[dict[str, Any]], balances: list[dict[str, Any]], turns: int, steps: int) -> str:
    lines = [
        "# Pipeline",
        "",
        f"`python benchmarks/pipeline.py --turns {turns} --steps {steps}`: {BLOCKS} blocks of width {WIDTH}, {ROWS} "
        f"rows of {LENGTH} tokens in {MICROBATCHES} micro-batches, two gloo processes with one thread each, "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}. Turns of the hand-written program "
        "and of the unchanged LightningModule in a Trainer (with logging) alternate in the same processes.",
        "",
        "| schedule | hand-written, median | ours, median | ratio | ratio of the best | idle, measured | foretold |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        hand, ours = row["median"]["hand"], row["median"]["ours"]
        best = row["best"]["ours"] / row["best"]["hand"]
        lines.append(
            f"| {row['schedule']} | {1e3 * hand:.1f} ms | {1e3 * ours:.1f} ms | {ours / hand:.3f} | {best:.3f} | "
            f"{100 * row['idle']:.1f} % | {100 * row['foretold']:.1f} % |"
        )
    lines += ["", "Measured idle time holds communication over gloo, and whatever else ran on the machine.", ""]
    lines += [
        f"Stages of the same model with a vocabulary of {HEAVY}, whose head costs about two blocks: the dearest of two "
        "stages over the mean, in FLOPs and in measured time (median of the turns).",
        "",
        "| split | blocks | counted | measured |",
        "| --- | --- | --- | --- |",
    ]
    for row in balances:
        words = " + ".join(map(str, row["blocks"]))
        lines.append(f"| {row['split']} | {words} | {row['counted']:.3f} | {row['measured']:.3f} |")
    lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=worker, args=(rank, store, chosen.turns, chosen.steps, queue)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = queue.get(timeout=1200)
        for process in processes:
            process.join(60)
    text = report(*found, chosen.turns, chosen.steps)
    print(text)
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
