"""Step time of a pipeline of two processes: an unchanged LightningModule in a Trainer against a hand-written program.

The hand-written program is what torch's tutorial shows: stages split by hand, ``PipelineStage``, a schedule, an
optimizer; no Lightning, no logging. Both train the same model on the same data on two gloo ranks. They take turns in
the same processes, some steps each, so that a busy machine slows both alike; medians of the turns are compared. Beside
it the measured idle share.

Then the balance of stages with a heavy head: what the planner counts and what a step measures, split by cost and by
number of blocks.

    python -m benchmarks.pipeline [--turns 6] [--steps 8] [--write benchmarks/results/pipeline.md]
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.support.by_hand import GPT, LEFT_OUT, Clock, LitGPT, Shape, loader, machine, main, times_of, trainer
from lightning_pardist import PipelineOptions

SHAPE = Shape(vocabulary=512, length=64, width=192, blocks=8, rows=16)
WIDTH, MICROBATCHES = SHAPE.width, 8
HEAVY = replace(SHAPE, vocabulary=4 * 1216)
"""With a head of two blocks' cost: 12 WIDTH^2 weights and the attention's products each."""
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


class HandStage(nn.Module):
    """A stage written by hand."""

    def __init__(self, model: GPT, blocks: range) -> None:
        super().__init__()
        self.first, self.last = blocks.start == 0, blocks.stop == SHAPE.blocks
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
        model, rank = GPT(SHAPE, Block), dist.get_rank()
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


def fit(module: LitGPT, steps: int, clock: Clock, **options: Any) -> L.Trainer:
    pipeline = PipelineOptions(num_microbatches=MICROBATCHES, **options)
    run = trainer(steps, clock, pipeline_parallel_size=2, pipeline=pipeline)
    run.fit(module, loader(SHAPE, steps + LEFT_OUT))
    return run


def measure(turns: int, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return [race(schedule, turns, steps) for schedule in SCHEDULES], balance(turns)


def race(schedule: str, turns: int, steps: int) -> dict[str, Any]:
    clock = Clock()
    torch.manual_seed(0)
    ours = LitGPT(GPT(SHAPE, Block))
    run = fit(ours, 1, clock, schedule=schedule)
    plan = run.strategy.plan.pipeline
    hand = HandWritten(schedule, [range(stage.first, stage.stop) for stage in plan.stages])
    batches = list(loader(SHAPE, steps + LEFT_OUT))
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    for _ in range(turns):
        times["hand"] += times_of(hand.step, batches)[0]
        clock.times.clear()
        fit(ours, steps, clock, schedule=schedule)
        times["ours"] += clock.times
    medians = {name: statistics.median(found) for name, found in times.items()}
    best = {name: min(found) for name, found in times.items()}
    events, _ = timeline(LitGPT(GPT(SHAPE, Block)), schedule=schedule)
    idle = 0.0
    if events:
        length = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        idle = 1 - sum(e["dur"] for e in events) / (2 * length)
    return {"schedule": schedule, "median": medians, "best": best, "idle": idle, "foretold": plan.idle_share,
            "balance": plan.balance}  # fmt: skip


def timeline(module: LitGPT, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """Returns the actions of one step with their times, on rank 0, and the plan."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "step.json")
        run = fit(module, 4, Clock(), timeline=path, **options)
        events = json.loads(Path(path).read_text())["traceEvents"] if dist.get_rank() == 0 else []
    return events, run.strategy.plan.pipeline


def balance(turns: int) -> list[dict[str, Any]]:
    """Dearest stage over the mean, counted and measured, for a vocabulary of two blocks' cost."""
    rows, half = [], SHAPE.blocks // 2
    for name, split in (("by cost", "auto"), ("by number of blocks", [half, half])):
        measured, plan = [], None
        for _ in range(turns):
            events, plan = timeline(LitGPT(GPT(HEAVY, Block)), schedule="1f1b", split=split)
            busy = [sum(e["dur"] for e in events if e["name"][0] == str(stage)) for stage in range(2)]
            measured.append(2 * max(busy) / max(sum(busy), 1))
        blocks = [len(stage.blocks) for stage in plan.stages]
        rows.append({"split": name, "blocks": blocks, "counted": plan.balance, "measured": statistics.median(measured)})
    return rows


def report(measured: tuple[list[dict[str, Any]], list[dict[str, Any]]], turns: int, steps: int) -> str:
    found, balances = measured
    lines = [
        "# Pipeline",
        "",
        f"`python -m benchmarks.pipeline --turns {turns} --steps {steps}`: {SHAPE.blocks} blocks of width "
        f"{WIDTH}, {SHAPE.rows} rows of {SHAPE.length} tokens in {MICROBATCHES} micro-batches, {machine()}. "
        "Turns of the hand-written program and of the unchanged LightningModule in a Trainer (with logging) alternate "
        "in the same processes.",
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
        f"Stages of the same model with a vocabulary of {HEAVY.vocabulary}, whose head costs about two blocks: the "
        "dearest of two stages over the mean, in FLOPs and in measured time (median of the turns).",
        "",
        "| split | blocks | counted | measured |",
        "| --- | --- | --- | --- |",
    ]
    for row in balances:
        words = " + ".join(map(str, row["blocks"]))
        lines.append(f"| {row['split']} | {words} | {row['counted']:.3f} | {row['measured']:.3f} |")
    lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    assert __doc__ is not None
    main(__doc__.splitlines()[0], measure, report)
