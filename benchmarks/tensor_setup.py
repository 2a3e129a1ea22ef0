"""How long the tensor-parallel plan of an 8B Llama takes, derived and tried, and what memory: weights on meta.

    python -m benchmarks.tensor_setup [--ranks 2] [--tokens 4096] [--write benchmarks/results/tensor_setup.md]

Gloo processes with one thread each take the path of a Trainer up to the plan: rank 0 derives it, all ranks try one
region of each kind (and with sequence parallel one block) with random weights in fp32. Nothing else is made of the
module: neither its weights nor its activations.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import resource
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.precision import Precision
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pardist import TensorOptions
from lightning_pardist.describe import profile_model
from lightning_pardist.mesh import build_meshes
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.strategies.sample import Sample
from lightning_pardist.strategies.tensor_planning import TensorSetup, plan_tensor_axis

SHAPE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


class Llama(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**SHAPE))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss


@dataclass
class Measured:
    """One rank, one set of options."""

    options: str
    seconds: dict[str, float]
    growth: int
    """Bytes by which the process grew at its largest."""
    notes: tuple[str, ...]


def measure(verify: Any, sequence_parallel: bool, tokens: int) -> Measured:
    module, batch = Llama(), torch.zeros(1, tokens, dtype=torch.long)
    module.trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    sizes = ParallelConfig(tensor_parallel_size=dist.get_world_size()).resolve(
        world_size=dist.get_world_size(), num_nodes=1
    )
    start = time.perf_counter()
    profile = profile_model(module, batch)
    described = time.perf_counter()
    setup = TensorSetup(
        module=module, profile=profile, sample=Sample(batch, "training_step"),
        options=TensorOptions(verify=verify, sequence_parallel=sequence_parallel), precision=Precision(),
        meshes=build_meshes(sizes, "cpu"), device=torch.device("cpu"),
    )  # fmt: skip
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plan = plan_tensor_axis(setup)
    end, end_cpu = time.perf_counter(), time.process_time()
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    words = f"`verify={verify!r}`" + (", `sequence_parallel=True`" if sequence_parallel else "")
    return Measured(
        words, {"describe": described - start, "plan": end - begin, "cpu": end_cpu - begin_cpu}, growth, plan.notes
    )


def worker(rank: int, store: str, ranks: int, case: tuple[Any, bool, int], queue: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = measure(*case)
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        queue.put(everybody)
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, case: tuple[Any, bool, int]) -> list[Measured]:
    """Returns what every rank measured, in processes of its own: memory is counted at its largest."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=worker, args=(rank, store, ranks, case, queue)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found: list[Measured] = queue.get(timeout=1200)
        for process in processes:
            process.join(60)
    return found


def report(cases: list[list[Measured]], ranks: int, tokens: int) -> str:
    """Returns the results as Markdown."""
    block = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    lines = [
        "# Set-up of a tensor-parallel 8B Llama",
        "",
        f"`python -m benchmarks.tensor_setup --ranks {ranks} --tokens {tokens}`: {ranks} gloo processes with one "
        f"thread each, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load at the end "
        f"{os.getloadavg()[0]:.1f}. 32 layers, 4096 wide, one sequence of {tokens} tokens, weights on meta. One block "
        f"has {block / 2**20:.0f} MiB in fp32. Describing is done for any layout; the plan is derived by rank 0 and "
        "tried by all.",
        "",
        "| | describe, s | derive and try, s | CPU seconds of it | grown by, MiB (largest rank) | blocks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for found in cases:
        seconds = {key: max(each.seconds[key] for each in found) for key in found[0].seconds}
        growth = max(each.growth for each in found)
        lines.append(
            f"| {found[0].options} | {seconds['describe']:.1f} | {seconds['plan']:.1f} | {seconds['cpu']:.1f} | "
            f"{growth / 2**20:.0f} | {growth / block:.1f} |"
        )
    lines += ["", *(f"- {found[0].options}: {'; '.join(found[0].notes)}" for found in cases if found[0].notes), ""]
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    cases = [("off", False), ("probe", False), ("probe", True)]
    text = report([run(chosen.ranks, (*case, chosen.tokens)) for case in cases], chosen.ranks, chosen.tokens)
    print(text)
    if chosen.write:
        chosen.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
