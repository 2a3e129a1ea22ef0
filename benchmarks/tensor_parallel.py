"""Step time of tensor parallel on two processes: an unchanged LightningModule against a hand-written plan.

The hand-written program is what torch's tutorial shows: ``parallelize_module`` with column, row and vocabulary styles
on local tensors, loss parallel, an optimizer; no Lightning, no logging. Both train the same model on the same data on
two gloo ranks. They take turns in the same processes, some steps each, so that a busy machine slows both alike; medians
of the turns are compared.

    python -m benchmarks.tensor_parallel [--turns 6] [--steps 8] [--write benchmarks/results/tensor_parallel.md]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.support.by_hand import GPT, LEFT_OUT, Clock, LitGPT, Shape, loader, machine, main, times_of, trainer

SHAPE = Shape(vocabulary=2048, length=128, width=256, blocks=6, rows=8)
WIDTH, HEAD_DIM = SHAPE.width, 32


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
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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
        # Plain and sharded parameters cannot share a group whose step is fused over tensors; on the CPU it is not.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        with loss_parallel():
            loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        return float(value.detach())


def race(turns: int, steps: int) -> dict[str, Any]:
    clock = Clock()
    torch.manual_seed(0)
    ours, hand = LitGPT(GPT(SHAPE, Block)), HandWritten()
    batches = list(loader(SHAPE, steps + LEFT_OUT))
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    losses: dict[str, float] = {}
    for turn in range(turns):
        taken, loss = times_of(hand.step, batches)
        times["hand"] += taken
        clock.times.clear()
        run = trainer(steps, clock, tensor_parallel_size=2)
        start = time.perf_counter()
        run.fit(ours, loader(SHAPE, steps + LEFT_OUT))
        if turn == 0:
            losses = {"hand": loss, "ours": float(run.callback_metrics["loss"])}
            setup = time.perf_counter() - start - sum(clock.times)
        times["ours"] += clock.times
    return {"times": times, "losses": losses, "setup": setup, "notes": run.strategy.plan.tensor.notes}


def report(found: dict[str, Any], turns: int, steps: int) -> str:
    medians = {name: statistics.median(values) for name, values in found["times"].items()}
    best = {name: min(values) for name, values in found["times"].items()}
    lines = [
        "# Tensor parallel",
        "",
        f"`python -m benchmarks.tensor_parallel --turns {turns} --steps {steps}`: {SHAPE.blocks} blocks of "
        f"width {WIDTH}, {SHAPE.rows} rows of {SHAPE.length} tokens, {SHAPE.vocabulary} words, {machine()}. Turns of "
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
    main(__doc__.splitlines()[0], race, report)
