"""How long describe, plan and apply take for Llama shapes of 8B and 70B on 512 ranks, without memory for weights.

    python benchmarks/setup_time.py            prints the table
    python benchmarks/setup_time.py --write    and writes benchmarks/results/setup_time.md

One process plays rank 0 of 64 nodes with 8 ranks each (hybrid sharding, 64 copies over 8 shards): torch's fake process
group answers every collective at once. So these are the host's own costs, the same on every rank; what a real network
and the making of weights add is not in them.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pardist.apply import apply_plan
from lightning_pardist.describe import profile_model
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.mesh import build_meshes
from lightning_pardist.plan import PlanInput, format_plan, make_plan
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.parallel_plan import ParallelPlan, PrecisionPlan

NODES, PER_NODE = 64, 8
RESULTS = Path(__file__).resolve().parent / "results" / "setup_time.md"
TOKENS = 4096
SHAPES = {
    "Llama 8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama 70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}

_T = TypeVar("_T")


@dataclass
class Timed:
    """Set-up of one shape."""

    name: str
    seconds: dict[str, float]
    plan: ParallelPlan
    parameters: int
    units: int
    resident_growth: int
    """Bytes by which the process grew at its largest."""


def measure(name: str) -> Timed:
    """Sets one shape up and returns the time of each step."""
    seconds: dict[str, float] = {}

    def timed(step: str, work: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        result = work()
        seconds[step] = time.perf_counter() - start
        return result

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = timed("build on meta", lambda: _llama(name))
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    profile = timed("describe", lambda: profile_model(module, batch, entry="forward"))
    assert profile.fallback_reason is None, profile.fallback_reason
    config = ParallelConfig(data_parallel_replicate_size=NODES, data_parallel_shard_size=PER_NODE)
    sizes = config.resolve(world_size=NODES * PER_NODE, num_nodes=NODES)
    given = PlanInput(
        table=module_table(module, profile.called_modules),
        profile=profile,
        config=config,
        sizes=sizes,
        precision=PrecisionPlan(name="bf16-mixed", gather_dtype="bfloat16", reduce_dtype="float32"),
        training=True,
    )
    plan = timed("plan", lambda: make_plan(given, optimizer_bytes_per_element=8))
    meshes = timed("mesh", lambda: build_meshes(sizes, "cpu"))
    timed("apply", lambda: apply_plan(module, plan, meshes, torch.device("meta")))
    units = sum(isinstance(child, FSDPModule) for child in module.modules())
    assert units == len(plan.data_parallel.units)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return Timed(name, seconds, plan, profile.num_parameters, units, growth)


def _llama(name: str) -> nn.Module:
    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **SHAPES[name])
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def report(rows: list[Timed]) -> str:
    """Returns the results as Markdown."""
    steps = list(rows[0].seconds)
    head = ["model", "parameters", "units", *(f"{step}, s" for step in steps), "sum, s", "grown by, MiB"]
    lines = [
        "# Set-up of 8B and 70B on 512 ranks",
        "",
        f"`python benchmarks/setup_time.py --write` (torch {torch.__version__}, {os.cpu_count()} cores, load at "
        f"the end {os.getloadavg()[0]:.1f}). One process, fake process group of {NODES} nodes x {PER_NODE} ranks, "
        f"bf16-mixed, one sequence of {TOKENS} tokens, weights on the meta device throughout.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for row in rows:
        times = [*row.seconds.values(), sum(row.seconds.values())]
        cells = [row.name, f"{row.parameters:,}", str(row.units), *(f"{t:.2f}" for t in times)]
        lines.append("| " + " | ".join([*cells, f"{row.resident_growth / 2**20:.0f}"]) + " |")
    lines += ["", "Not in these times: making and broadcasting the weights, and a real network.", ""]
    for row in rows:
        lines += [f"## The plan for {row.name}", "", "```", format_plan(row.plan), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=NODES * PER_NODE, store=FakeStore())
    text = report([measure(name) for name in SHAPES])
    print(text)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
