"""One rank of the race: trains all variants in turns, one step each per round, and lets rank 0 write what was measured.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.support.race --out FILE

Every round runs every variant once, in an order drawn anew, so that whatever else the machine does meets all of them
alike. A barrier comes before each step; a step's time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.support.state import LiveState
from benchmarks.support.traffic import Traffic, control_messages, totals
from benchmarks.support.turns import PausableRun
from benchmarks.support.variants import RECORDED_STEP, Found, Size, Variant, build, train

K = TypeVar("K")
WARM_UP = RECORDED_STEP + 2
"""Steps before the clock counts; the recorded step is one of them."""


def variants(world_size: int) -> list[Variant]:
    """Returns what is compared on so many ranks."""
    found = [Variant("ddp", by) for by in ("torch", "lightning ddp", "ours")]
    for layout in ("zero2", "fsdp", *(["hybrid"] if world_size >= 4 else [])):
        found += [Variant(layout, by) for by in ("torch", "model parallel", "ours")]
    return found


def race(entries: list[Variant], size: Size, rounds: int) -> dict[str, Any]:
    """Returns measurements by variant name; every rank must call it."""
    found = {entry: Found() for entry in entries}
    runs = {entry: PausableRun(lambda pause, entry=entry: train(entry, size, found[entry], pause)) for entry in entries}
    seconds = take_turns(runs, WARM_UP, rounds)
    return {entry.name: _measurements(entry, seconds[entry], found[entry]) for entry in entries}


def take_turns(runs: dict[K, PausableRun], warm_up: int, rounds: int) -> dict[K, list[tuple[float, float]]]:
    """Runs every run to its end, one step each per round; returns wall and processor seconds of the counted steps."""
    seconds: dict[K, list[tuple[float, float]]] = {entry: [] for entry in runs}
    order = random.Random(7)  # the same on all ranks: they must meet in the same collectives
    for run in runs.values():
        run.advance()  # set-up, to the first step
    for round_ in range(-warm_up, rounds):
        if round_ == 0:
            # What set-up made stays: collections then cost a variant what it makes itself, not what all others hold.
            gc.collect()
            gc.freeze()
        for entry in order.sample(list(runs), len(runs)):
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            runs[entry].advance()
            if round_ >= 0:
                seconds[entry].append((time.perf_counter() - start, time.process_time() - start_cpu))
    while not all(run.ended for run in runs.values()):
        for run in runs.values():
            if not run.ended:
                run.advance()
    return seconds


def _measurements(entry: Variant, seconds: list[tuple[float, float]], found: Found) -> dict[str, Any]:
    assert found.state is not None
    wall, cpu = torch.tensor(seconds, dtype=torch.float64).T.contiguous()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    losses = torch.stack(found.losses).double()
    dist.all_reduce(losses)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, found.state)
    most: LiveState = max(states, key=lambda state: state.total)
    data = totals(found.collectives, "data")
    return {
        **asdict(entry),
        "seconds": wall.tolist(),
        "cpu_seconds": cpu.tolist(),
        "losses": (losses / dist.get_world_size()).tolist(),
        "state": {**asdict(most), "total": most.total},
        "planned_state": found.planned_state,
        "traffic": _rows(data),
        "as_planned": None if found.planned is None else data == found.planned and most.total == found.planned_state,
        "control": {name: list(total) for name, total in control_messages(found.collectives).items()},
    }


def _rows(traffic: Traffic) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "ranks": list(ranks), "count": total.count, "nbytes": total.nbytes}
        for (kind, ranks), total in sorted(traffic.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], help="parts of variant names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch.*")
    dist.init_process_group("gloo")
    # One more than is counted: the time between two start lines needs the later one.
    size = Size(width=options.width, depth=options.depth, rows=options.rows, steps=WARM_UP + options.rounds + 1)
    entries = variants(dist.get_world_size())
    entries = [e for e in entries if not options.only or any(part in e.name for part in options.only)]
    model = build(size)
    results = {
        "world_size": dist.get_world_size(),
        "size": asdict(size),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_tensors": sum(1 for _ in model.parameters()),
        "rounds": options.rounds,
        "variants": race(entries, size, options.rounds),
    }
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
