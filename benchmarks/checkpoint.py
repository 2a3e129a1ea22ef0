"""Checkpoints against the parts they are made of: raw torch.distributed.checkpoint, a plain wait, the model's size.

    python -m benchmarks.checkpoint [--megabytes 256] [--ranks 2] [--repeats 5]

Saves and loads are measured on ranks of fully_shard on CPU (gloo). Ours and raw are taken in turn, since a
shared machine is never the same twice. Writes
``benchmarks/results/checkpoint.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_pardist.checkpoint import Saver, TrainState, load_checkpoint
from lightning_pardist.checkpoint.state import take_snapshot
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

RESULTS = Path(__file__).parent / "results" / "checkpoint.md"
WIDTH = 1024


def build(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model whose weights have about so many MiB, after one AdamW step (the state is three times that)."""
    torch.manual_seed(0)
    layers = max(1, round(megabytes * 2**20 / (4 * WIDTH * WIDTH)))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def raw_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the very tensors that our save writes, under the same keys, for raw torch.distributed.checkpoint."""
    state = {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        state.update({f"optim.0.{name}.{key}": value for key, value in optimizer.state[parameter].items()})
    assert {entry.name for entry in take_snapshot(TrainState(module, [optimizer])).entries} == set(state)
    return state


def timed(work: Callable[[], Any], group: Any) -> float:
    dist.barrier(group)
    started = time.perf_counter()
    work()
    dist.barrier(group)
    return time.perf_counter() - started


def rank_main(folder: Path, megabytes: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    module, optimizer = build(megabytes)
    state = TrainState(module, [optimizer])
    savers = {behind: Saver(CheckpointOptions(async_save=behind), group) for behind in (False, True)}
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for turn in range(repeats + 1):  # the first one warms up: buffers, plans, the disk
        raw = raw_state(module, optimizer)
        works = {
            "save raw": lambda raw=raw: dcp.save(raw, checkpoint_id=folder / "raw", process_group=group),
            "save ours": lambda: savers[False].save(str(folder / "ours"), state),
            "load raw": lambda raw=raw: dcp.load(raw, checkpoint_id=folder / "raw", process_group=group),
            "load ours": lambda: load_checkpoint(str(folder / "ours"), state, control_group=group),
            "load ours, sizes only": lambda: load_checkpoint(
                str(folder / "ours"), state, options=CheckpointOptions(verify_on_load="size"), control_group=group
            ),
        }
        names = list(works) if turn % 2 else ["save ours", "save raw", *list(works)[:1:-1]]
        for name in names:
            if name.startswith("save") and dist.get_rank() == 0:
                shutil.rmtree(folder / name.rpartition(" ")[2], ignore_errors=True)
            seconds = timed(works[name], group)
            if turn:
                note(name, seconds)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "behind", ignore_errors=True)
        dist.barrier(group)
        handle = savers[True].save(str(folder / "behind"), state)
        savers[True].wait()
        if turn:
            note("async stall", handle.stall_s)
            note("async total", handle.total_s)
    for saver in savers.values():
        saver.close()
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


MEASURE = """
import resource, sys
import torch
from lightning_pardist.checkpoint import consolidate
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
consolidate(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


def consolidate_peak(folder: Path) -> tuple[int, float]:
    """Returns by how many bytes the process of a consolidation grew at most, and how long it took."""
    started = time.perf_counter()
    command = [sys.executable, "-c", MEASURE, str(folder / "ours"), str(folder / "out.ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout), time.perf_counter() - started


def ratio(times: dict[str, list[float]], ours: str, raw: str) -> float:
    """Returns the ratio of the best times: what other work on the machine adds is never the code's own."""
    return min(times[ours]) / min(times[raw])


def middle_ratio(times: dict[str, list[float]], ours: str, raw: str) -> float:
    return statistics.median(a / b for a, b in zip(times[ours], times[raw]))


def report(times: dict[str, list[float]], peak: int, seconds: float, settings: argparse.Namespace) -> str:
    model = settings.megabytes * 2**20
    pairs = [
        ("save: ours / raw", "save ours", "save raw", 1.05),
        ("load, every byte checked (the default): ours / raw", "load ours", "load raw", 1.05),
        ("load, sizes checked: ours / raw", "load ours, sizes only", "load raw", 1.05),
        ("stall of an asynchronous save / synchronous save", "async stall", "save ours", 0.25),
    ]
    rows = [
        *((f"{name}, best times", ratio(times, ours, raw), most) for name, ours, raw, most in pairs),
        *((f"{name}, median of pairs", middle_ratio(times, ours, raw), most) for name, ours, raw, most in pairs),
        ("consolidate: peak memory / weights", peak / model, 1.3),
        ("consolidate: peak memory / weights and optimizer state", peak / (3 * model), 1.3),
    ]
    lines = [
        "# Checkpoints",
        "",
        f"`python -m benchmarks.checkpoint --megabytes {settings.megabytes} --ranks {settings.ranks} "
        f"--repeats {settings.repeats}`, torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work, {settings.ranks} gloo ranks, "
        f"{settings.megabytes} MiB of weights and twice that of AdamW state, in fp32.",
        "",
        "| figure | measured | target | met |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {value:.3f} | <= {target} | {'yes' if value <= target else 'no'} |"
            for name, value, target in rows
        ),
        "",
        "| work | median seconds | all |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {statistics.median(values):.3f} | {', '.join(f'{value:.3f}' for value in values)} |"
            for name, values in times.items()
        ),
        f"| consolidate, with the start of Python | {seconds:.3f} | |",
        "",
        "Saves go to new names. Other work on the machine moves the medians by a tenth and more from run to run; the",
        "best times are steadier. The disk's cache is warm, which is the worst case for checksums: their time hides",
        "behind a slow disk or on idle cores, and here there is neither.",
        "The peak is the growth of the largest resident size of a process that consolidates, after its imports; the",
        "model is never whole in memory, so it depends on the largest tensor.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.as_rank:
        rank_main(settings.folder, settings.megabytes, settings.repeats)
        return
    folder = Path(tempfile.mkdtemp(prefix="pardist-checkpoint-", dir=settings.folder))
    try:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.ranks}"]
        command += ["-m", "benchmarks.checkpoint", "--as-rank", "--folder", str(folder)]
        command += ["--megabytes", str(settings.megabytes), "--repeats", str(settings.repeats)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        times = json.loads((folder / "times.json").read_text())
        text = report(times, *consolidate_peak(folder), settings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
