"""The runs behind ``benchmarks/gpu.py``, each section in a process of its own.

    python -m benchmarks.support.gpu_runs SECTION --out FILE [--device cuda] [--tiny]

Every section writes a JSON object. What fails is noted as text: one section's failure is a result, not the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.support.gpu_fit import STEPS, TINY, Notes, Setting, Size, attempt, fit, mesh_of_one, one_run
from benchmarks.support.turns import PausableRun
from lightning_pardist import HybridStrategy
from lightning_pardist.checkpoint import Saver
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("32-true", "bf16-mixed")
WARM_UP, ROUNDS = 5, 30
RANK_SECONDS = 150.0
"""Bound on several processes that share a card."""


def alone(setting: Setting) -> dict[str, Any]:
    """Plain Lightning twice (the noise of the card itself), our names, and shards on a mesh of one."""
    strategies: dict[str, Callable[[], Any]] = {
        "auto": lambda: "auto",
        "auto again": lambda: "auto",
        "pardist_fsdp": lambda: "pardist_fsdp",
        "pardist_hybrid": lambda: HybridStrategy(print_plan=False),
        "mesh of one": lambda: mesh_of_one(setting),
        "mesh of one, ZeRO-2": lambda: mesh_of_one(setting, zero_stage=2),
    }
    return {
        precision: {
            name: attempt(lambda make=make, precision=precision: one_run(setting, make(), precision))
            for name, make in strategies.items()
        }
        for precision in PRECISIONS
    }


def turns(setting: Setting) -> dict[str, Any]:
    """Step times, one step each per round in an order drawn anew: what the machine does meets all alike."""
    strategies: dict[str, Callable[[], Any]] = {
        "auto": lambda: "auto",
        "pardist_fsdp": lambda: HybridStrategy(print_plan=False, data_parallel_replicate_size=1),
        "mesh of one": lambda: mesh_of_one(setting),
    }
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        seconds: dict[str, list[float]] = {name: [] for name in strategies}
        runs = {
            name: PausableRun(
                lambda pause, make=make, precision=precision: fit(  # type: ignore[misc]
                    setting, make(), precision, steps=WARM_UP + ROUNDS + 1, callbacks=[Notes(pause)]
                )
            )
            for name, make in strategies.items()
        }
        order = random.Random(7)
        for run in runs.values():
            run.advance()
        for round_ in range(-WARM_UP, ROUNDS):
            for name in order.sample(list(runs), len(runs)):
                synchronize(setting)
                start = time.perf_counter()
                runs[name].advance()
                synchronize(setting)
                if round_ >= 0:
                    seconds[name].append(time.perf_counter() - start)
        for run in runs.values():
            while not run.ended:
                run.advance()
        found[precision] = seconds
    return found


def synchronize(setting: Setting) -> None:
    """Waits for the device."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


class SaveAt(L.Callback):
    """One save after a step, and how long training stood still for it."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step
        self.stall_s = self.total_s = 0.0
        self.pinned: bool | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != self.step:
            return
        start = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.stall_s = time.perf_counter() - start
        saver: Saver | None = trainer.strategy._keeper._saver  # type: ignore[attr-defined]
        buffers = list(saver._buffers._buffers.values()) if saver is not None else []
        self.pinned = all(b.is_pinned() for b in buffers) if buffers else None


def checkpoints(setting: Setting) -> dict[str, Any]:
    """Saves in the middle, waiting and behind (twice: the second time the pinned memory is there), and resumes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, behind in (("waiting", False), ("behind", True)):
            found[name] = attempt(lambda name=name, behind=behind: _saved(setting, f"{folder}/{name}", behind))
    return found


def _saved(setting: Setting, path: str, behind: bool) -> dict[str, Any]:
    strategy = lambda: mesh_of_one(setting, checkpoint=CheckpointOptions(async_save=behind))  # noqa: E731
    middle, again = SaveAt(path, STEPS // 2), SaveAt(f"{path}-again", STEPS // 2 + 2)
    whole, resumed = Notes(), Notes()
    fit(setting, strategy(), "bf16-mixed", steps=STEPS, callbacks=[whole, middle, again])
    trainer = fit(setting, strategy(), "bf16-mixed", steps=STEPS, callbacks=[resumed], resume=path)
    bytes_ = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return {
        "losses": [float(x) for x in whole.losses[STEPS // 2 :]],
        "resumed": [float(x) for x in resumed.losses],
        "stalls": [middle.stall_s, again.stall_s],
        "pinned": middle.pinned,
        "bytes": bytes_,
        "steps": trainer.global_step,
    }


def features(setting: Setting) -> dict[str, Any]:
    """Offload to the host and compiled blocks, on a mesh of one, against plain Lightning."""
    both = f"cpu:gloo,cuda:{setting.backend}" if setting.device == "cuda" else "gloo"
    runs: dict[str, Callable[[], Any]] = {
        "auto": lambda: one_run(setting, "auto", "bf16-mixed"),
        "offloaded": lambda: one_run(
            setting, mesh_of_one(setting, cpu_offload=True, process_group_backend=both), "bf16-mixed"
        ),
        "auto, blocks compiled": lambda: one_run(setting, "auto", "bf16-mixed", compiles=True),
        "pardist_fsdp, blocks compiled": lambda: one_run(setting, "pardist_fsdp", "bf16-mixed", compiles=True),
        "mesh of one, blocks compiled": lambda: one_run(setting, mesh_of_one(setting), "bf16-mixed", compiles=True),
        "accumulation": lambda: one_run(setting, mesh_of_one(setting), "bf16-mixed", accumulate_grad_batches=2),
        "auto, accumulation": lambda: one_run(setting, "auto", "bf16-mixed", accumulate_grad_batches=2),
    }
    return {name: attempt(run) for name, run in runs.items()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"zero_stage": 0}),
    "zero2": (2, {"zero_stage": 2, "data_parallel_replicate_size": 1}),
    "fsdp": (2, {"zero_stage": 3, "data_parallel_replicate_size": 1}),
    "fsdp on four": (4, {"zero_stage": 3, "data_parallel_replicate_size": 1}),
    "hybrid on four": (4, {"zero_stage": 3, "data_parallel_replicate_size": 2}),
}


def together(setting: Setting) -> dict[str, Any]:
    """Several ranks on the one device over gloo, and what NCCL says to that."""
    found: dict[str, Any] = {"one process": {p: attempt(lambda p=p: one_run(setting, "auto", p)) for p in PRECISIONS}}
    backend = "cpu:gloo,cuda:gloo" if setting.device == "cuda" else "gloo"
    for name in LAYOUTS:
        found[name] = _on_ranks(setting, name, backend)
    if setting.device == "cuda":
        found["fsdp over nccl"] = _on_ranks(setting, "fsdp", "nccl")
    return found


def _on_ranks(setting: Setting, layout: str, backend: str) -> dict[str, Any]:
    ranks = LAYOUTS[layout][0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.support.gpu_runs", "rank", "--device", setting.device]
        command += ["--layout", layout, "--backend", backend, *(["--tiny"] if setting.size == TINY else [])]
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        processes = [
            subprocess.Popen(
                [*command, "--out", f"{folder}/{rank}.json"],
                env={**os.environ, **rendezvous, "NODE_RANK": str(rank), "LOCAL_RANK": "0"},
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        deadline, errors = time.monotonic() + RANK_SECONDS, []
        for process in processes:
            try:
                errors.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1])
            except subprocess.TimeoutExpired:
                process.kill()
                errors.append(f"no end in {RANK_SECONDS:.0f} s\n{process.communicate()[1]}")
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        if not all(file.exists() for file in files):
            return {"error": "\n".join(error[-1500:] for error in errors)}
        results: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    first = results[0]
    first["ranks_agree"] = all(each[p].get("losses") == first[p].get("losses") for each in results for p in PRECISIONS)
    return first


def rank(setting: Setting, layout: str, backend: str) -> dict[str, Any]:
    """One of several ranks on the device."""
    ranks, arguments = LAYOUTS[layout]
    make = lambda: HybridStrategy(print_plan=False, process_group_backend=backend, **arguments)  # noqa: E731
    return {p: attempt(lambda p=p: one_run(setting, make(), p, ranks=ranks)) for p in PRECISIONS}


SECTIONS = {f.__name__: f for f in (alone, turns, checkpoints, features, together)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=[*SECTIONS, "rank"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layout")
    parser.add_argument("--backend")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    setting = Setting(options.device, TINY if options.tiny else Size())
    if options.section == "rank":
        found = rank(setting, options.layout, options.backend)
    else:
        found = SECTIONS[options.section](setting)
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
