"""Step time of tensor parallel, alone and with FSDP: an unchanged LightningModule against a hand-written plan.

The hand-written program is what torch's tutorials show: ``parallelize_module`` with column, row and vocabulary styles
on local tensors, loss parallel, an optimizer; no Lightning, no logging. On four ranks two share each matrix, and
``fully_shard`` cuts blocks and root over the other two. Both programs train the same model on the same data. They take
turns in the same processes, some steps each, so that a busy machine slows both alike; medians are compared.

    python -m benchmarks.tensor_parallel [--ranks 2] [--turns 6] [--steps 8] [--write FILE]
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.support.by_hand import GPT, LEFT_OUT, Clock, LitGPT, Shape, loader, machine, main, times_of, trainer

SHAPE = Shape(vocabulary=2048, length=128, width=256, blocks=6, rows=8)
WIDTH, HEAD_DIM = SHAPE.width, 32
TENSOR = 2
"""Ranks that share each matrix."""


class Block(nn.Module):
    """Sizes follow the tensors, so that the same code runs on local shards in both programs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class HandWritten:
    """The same model with a plan by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(SHAPE, Block)
        meshes = init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
        mesh, self.data = meshes["tensor"], meshes["data"]
        parallelize_module(
            self.model,
            mesh,
            {
                "embedding": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            },
        )
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = {"q": column, "k": column, "v": column, "proj": row, "up": column, "down": row}
        for block in self.model.blocks:
            parallelize_module(block, mesh, plan)
            if self.data.size() > 1:
                fully_shard(block, mesh=self.data)
        if self.data.size() > 1:
            fully_shard(self.model, mesh=self.data)
        # Plain and sharded parameters cannot share a group whose step is fused over tensors; on the CPU it is not.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        with loss_parallel():
            loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()
        dist.all_reduce(value, group=self.data.get_group())
        return float(value) / self.data.size()


def race(turns: int, steps: int) -> dict[str, Any]:
    clock = Clock()
    torch.manual_seed(0)
    ours, hand = LitGPT(GPT(SHAPE, Block)), HandWritten()
    data_ranks, data_rank = hand.data.size(), hand.data.get_local_rank()
    batches = list(loader(SHAPE, steps + LEFT_OUT, data_ranks, data_rank))
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    losses: dict[str, float] = {}
    for turn in range(turns):
        taken, loss = times_of(hand.step, batches)
        times["hand"] += taken
        clock.times.clear()
        run = trainer(steps, clock, tensor_parallel_size=TENSOR)
        start = time.perf_counter()
        run.fit(ours, loader(SHAPE, steps + LEFT_OUT, data_ranks))
        if turn == 0:
            losses = {"hand": loss, "ours": float(run.callback_metrics["loss"])}
            setup = time.perf_counter() - start - sum(clock.times)
        times["ours"] += clock.times
    notes = run.strategy.plan.tensor.notes
    return {"times": times, "losses": losses, "setup": setup, "notes": notes, "ranks": dist.get_world_size()}


def report(found: dict[str, Any], turns: int, steps: int) -> str:
    medians = {name: statistics.median(values) for name, values in found["times"].items()}
    best = {name: min(values) for name, values in found["times"].items()}
    lines = [
        "# Tensor parallel" if found["ranks"] == TENSOR else f"# FSDP {found['ranks'] // TENSOR} x tensor {TENSOR}",
        "",
        f"`python -m benchmarks.tensor_parallel --ranks {found['ranks']} --turns {turns} --steps {steps}`: "
        f"{SHAPE.blocks} blocks of width {WIDTH}, {SHAPE.rows} rows of {SHAPE.length} tokens for each data rank, "
        f"{SHAPE.vocabulary} words, {machine(found['ranks'])}, load at the end {os.getloadavg()[0]:.1f}. Turns of "
        "a hand-written `parallelize_module` plan with loss parallel and of the unchanged LightningModule in a Trainer "
        "(with logging) alternate in the same processes.",
        "",
        "| | hand-written | ours | ratio |",
        "| --- | --- | --- | --- |",
        f"| median step | {1e3 * medians['hand']:.1f} ms | {1e3 * medians['ours']:.1f} ms | "
        f"{medians['ours'] / medians['hand']:.3f} |",
        f"| best step | {1e3 * best['hand']:.1f} ms | {1e3 * best['ours']:.1f} ms | "
        f"{best['ours'] / best['hand']:.3f} |",
        f"| loss at the end of the first turn | {found['losses']['hand']:.6f} | {found['losses']['ours']:.6f} | |",
        "",
        f"Set-up of the first fit (deriving, trying, cutting, Lightning's own): {found['setup']:.1f} s. "
        f"The plan's notes: {'; '.join(found['notes'])}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    assert __doc__ is not None
    main(__doc__.splitlines()[0], race, report, sizes=(TENSOR, 2 * TENSOR))
