"""``pardist doctor``: is this machine, or this job, fit for a run? Every wait is bounded.

By itself it starts a few processes here; under torchrun or srun (``torchrun ... -m lightning_pardist.cli.main doctor``)
it checks the ranks of the job.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.multiprocessing.spawn import spawn

from lightning_pardist.cli.doctor_checks import advice, check_mesh, default_backend, machine_rows
from lightning_pardist.run.meeting import meet
from lightning_pardist.specs.config import ParallelConfig


def add_commands(parser: ArgumentParser) -> None:
    """Adds the arguments of ``pardist doctor``."""
    parser.add_argument(
        "--processes", type=int | None, default=None, help="to start here; default: one per device, or 2"
    )
    parser.add_argument("--data_parallel_replicate_size", type=int, default=0, help="0: one copy per node")
    parser.add_argument("--data_parallel_shard_size", type=int, default=0, help="0: what the other axes leave")
    parser.add_argument("--backend", type=str | None, default=None, help="nccl, gloo, ...; default: by device")
    parser.add_argument("--megabytes", type=float, default=16.0, help="size of the tensors that are sent around")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="longest wait in seconds, for ranks and collectives"
    )


def run(arguments: Namespace) -> None:
    """Checks and prints."""
    given = {name: value for name, value in arguments.as_dict().items() if name != "processes"}
    launched = _launched()
    if launched is not None:
        _as_rank(launched["local_rank"], given, launched)
        return
    count = arguments.processes or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    if count == 1:
        _print_machine()
        print("One process: there is no other rank to talk to.")
        return
    place = {"world_size": count, "address": "127.0.0.1", "port": _free_port(), "per_node": count}
    spawn(_as_rank, args=(given, place), nprocs=count)


def _launched() -> dict[str, Any] | None:
    """Returns this rank's place if a launcher started it, else None."""
    for environment in (TorchElasticEnvironment, SLURMEnvironment):
        if environment.detect() and not (environment is SLURMEnvironment and "SLURM_PROCID" not in os.environ):
            found = environment()
            per_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or "1"
            return {
                "rank": found.global_rank(),
                "local_rank": found.local_rank(),
                "world_size": found.world_size(),
                "address": found.main_address,
                "port": found.main_port,
                "per_node": int(per_node),
            }
    return None


def _as_rank(local_rank: int, given: dict[str, Any], place: dict[str, Any]) -> None:
    rank, world_size = place.get("rank", local_rank), place["world_size"]
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if rank == 0:
        _print_machine()
    meet(place["address"], place["port"], rank=rank, world_size=world_size, timeout_s=given["timeout"])
    backend = given["backend"] or default_backend(device_type)
    os.environ.update(
        MASTER_ADDR=place["address"],
        MASTER_PORT=str(place["port"]),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(place["per_node"]),
    )
    dist.init_process_group(backend, timeout=timedelta(seconds=given["timeout"]))
    try:
        _check(rank, device_type, backend, given, place)
    finally:
        dist.destroy_process_group()


def _check(rank: int, device_type: str, backend: str, given: dict[str, Any], place: dict[str, Any]) -> None:
    config = ParallelConfig(
        data_parallel_replicate_size=given["data_parallel_replicate_size"] or "auto",
        data_parallel_shard_size=given["data_parallel_shard_size"] or "auto",
    )
    nbytes, timeout_s = int(given["megabytes"] * 1e6), given["timeout"]
    rows = check_mesh(config, device_type, nbytes=nbytes, timeout_s=timeout_s)
    if rank != 0:
        return
    num_nodes = max(1, place["world_size"] // place["per_node"])
    print(f"\nMesh of {place['world_size']} ranks on {num_nodes} node(s), backend {backend}, {nbytes} bytes per rank")
    _print_table(rows)
    sizes = config.resolve(world_size=place["world_size"], num_nodes=num_nodes)
    print("\nAdvice")
    for line in advice(sizes, place["per_node"], num_nodes):
        print(f"  {line}")
    sys.stdout.flush()


def _print_machine() -> None:
    print("Machine")
    _print_table(machine_rows())


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
