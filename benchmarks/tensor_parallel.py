"""Step time of tensor parallel on two processes: an unchanged LightningModule against a hand-written plan.

The hand-written program is what torch's tutorial shows: ``parallelize_module`` with column, row and vocabulary styles
on local tensors, loss parallel, an optimizer; no Lightning, no logging. Both train the same model on the same data on
two gloo ranks. They take turns in the same processes, some steps each, so that a busy machine slows both alike; medians
of the turns are compared.

    python benchmarks/tensor_parallel.py [--turns 6] [--steps 8] [--write benchmarks/results/tensor_parallel.md]
"""

from __future__ import annotations

import argparse
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy

VOCABULARY, LENGTH, WIDTH, BLOCKS, ROWS, HEAD_DIM = 2048, 128, 256, 6, 8, 32


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


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitGPT(L.LightningModule):
    """What a user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class HandWritten:
    """The same model with a plan by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT()
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


def trainer(steps: int, clock: Clock) -> L.Trainer:
    return L.Trainer(
        strategy=HybridStrategy(tensor_parallel_size=2, print_plan=False),
        accelerator="cpu", devices=2, max_steps=steps + 2, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def race(turns: int, steps: int) -> dict[str, Any]:
    clock = Clock()
    torch.manual_seed(0)
    ours, hand = LitGPT(), HandWritten()
    batches = list(DataLoader(data(ROWS * (steps + 2)), batch_size=ROWS))
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    losses: dict[str, float] = {}
    for turn in range(turns):
        for index, batch in enumerate(batches):
            start = time.perf_counter()
            loss = hand.step(batch)
            if index >= 2:
                times["hand"].append(time.perf_counter() - start)
        clock.times.clear()
        run = trainer(steps, clock)
        start = time.perf_counter()
        run.fit(ours, DataLoader(data(ROWS * (steps + 2)), batch_size=ROWS))
        if turn == 0:
            losses = {"hand": loss, "ours": float(run.callback_metrics["loss"])}
            setup = time.perf_counter() - start - sum(clock.times)
        times["ours"] += clock.times
    return {"times": times, "losses": losses, "setup": setup, "notes": run.strategy.plan.tensor.notes}


def worker(rank: int, store: str, turns: int, steps: int, queue: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="0", NODE_RANK="0")  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = race(turns, steps)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, Any], turns: int, steps: int) -> str:
    medians = {name: statistics.median(values) for name, values in found["times"].items()}
    best = {name: min(values) for name, values in found["times"].items()}
    lines = [
        "# Tensor parallel",
        "",
        f"`python benchmarks/tensor_parallel.py --turns {turns} --steps {steps}`: {BLOCKS} blocks of width {WIDTH}, "
        f"{ROWS} rows of {LENGTH} tokens, {VOCABULARY} words, two gloo processes with one thread each, "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}. Turns of a hand-written "
        "`parallelize_module` plan with loss parallel and of the unchanged LightningModule in a Trainer (with logging) "
        "alternate in the same processes.",
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


def main() -> None:
    assert __doc__ is not None
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
    text = report(found, chosen.turns, chosen.steps)
    print(text)
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
