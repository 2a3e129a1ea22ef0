"""One rank of the race: trains programs of ``table.py`` in turns, one step each per round.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peer_programs.race \\
        --out FILE --only "fsdp, torch" "fsdp, ours"
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from benchmarks.peer_programs.table import DATA_RANKS, LIGHTNING, Program, named
from benchmarks.peer_programs.task import TRACED_STEP, Found, RandomTokens, Shape, Task
from benchmarks.support.race import take_turns
from benchmarks.support.state import LiveState
from benchmarks.support.traffic import totals
from benchmarks.support.turns import PausableRun

WARM_UP = TRACED_STEP + 1


def race(programs: list[Program], shape: Shape, rounds: int, folder: str) -> dict[str, Any]:
    """Returns the judge's losses and measurements by program; every rank must call it."""
    steps = WARM_UP + rounds + 1  # the time between two start lines needs the later one
    data = RandomTokens(shape, shape.rows * steps)
    found = {program: Found() for program in programs}

    def body(program: Program) -> Any:
        ranks = DATA_RANKS.get(program.layout, 1)
        train, sampler = program.load(), _in_order(data, ranks) if program.by == LIGHTNING else None
        return lambda pause: train(Task(folder, data, shape.rows // ranks, steps, sampler, found[program], pause))

    judge = Found()
    alone = programs[0].one_process()
    PausableRun(lambda pause: alone(Task(folder, data, shape.rows, steps, None, judge, lambda: None))).advance()
    seconds = take_turns({program: PausableRun(body(program)) for program in programs}, WARM_UP, rounds)
    assert judge.state is not None
    return {
        "one process": {"losses": judge.losses, "state": judge.state.total, "growth": judge.growth},
        "programs": {program.name: _measured(program, seconds[program], found[program]) for program in programs},
    }


def _in_order(data: RandomTokens, ranks: int) -> DistributedSampler[int]:
    # Lightning's mesh has the data axis outside.
    return DistributedSampler(data, ranks, dist.get_rank() * ranks // dist.get_world_size(), shuffle=False)


def _measured(program: Program, seconds: list[tuple[float, float]], found: Found) -> dict[str, Any]:
    wall, cpu = torch.tensor(seconds, dtype=torch.float64).T.contiguous()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    ranks: list[Found] = [found] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    losses = [[loss for loss in step if loss is not None] for step in zip(*(rank.losses for rank in ranks))]
    most: LiveState = max((rank.state for rank in ranks if rank.state is not None), key=lambda state: state.total)
    return {
        "layout": program.layout,
        "by": program.by,
        "seconds": wall.tolist(),
        "cpu_seconds": cpu.tolist(),
        "losses": [sum(step) / len(step) for step in losses],
        "state": {**asdict(most), "total": most.total},
        "growth": max(rank.growth for rank in ranks),
        "traffic": _traffic(found),
    }


def _traffic(found: Found) -> list[dict[str, Any]]:
    """Collectives of this rank by plane, kind and size of the group."""
    rows = []
    for plane in ("data", "stages", "control"):
        for (kind, ranks), total in sorted(totals(found.collectives, plane).items()):
            rows.append({"plane": plane, "kind": kind, "over": len(ranks), "count": total.count, "bytes": total.nbytes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="+", required=True, help="names of programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch.*")
    dist.init_process_group("gloo")
    shape = Shape()
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        model = shape.build()
        model.save_pretrained(names[0])  # which does so on rank 0 alone
        dist.barrier()
        results = {
            "processes": dist.get_world_size(),
            "shape": asdict(shape),
            "parameters": sum(p.numel() for p in model.parameters()),
            "rounds": options.rounds,
            **race(named(options.only), shape, options.rounds, names[0]),
        }
        dist.barrier()  # nobody reads the checkpoint any more
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
