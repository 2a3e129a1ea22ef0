"""What ``pardist doctor`` looks at: the machine from one process, and the mesh from every rank of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from lightning_pardist.base.version import __version__
from lightning_pardist.mesh import build_meshes, local_device
from lightning_pardist.plan.estimate import crosses_nodes
from lightning_pardist.specs.config import AxisSizes, ParallelConfig

_VARIABLES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "MASTER_", "OMP_NUM_THREADS", "SLURM_NNODES")
_TOOL_TIMEOUT_S = 15.0
Row = tuple[str, ...]


def machine_rows() -> list[Row]:
    """Returns versions, devices, links and variables that decide how ranks would talk."""
    rows: list[Row] = [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("lightning", lightning.__version__),
        ("lightning_pardist", __version__),
        ("backends", ", ".join(name for name, there in _backends().items() if there)),
    ]
    rows += _device_rows() + _link_rows()
    rows += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    return rows


def default_backend(device_type: str) -> str:
    """Returns the backend that a run on such devices would take."""
    return dist.get_default_backend_for_device(device_type)


def check_mesh(config: ParallelConfig, device_type: str, *, nbytes: int, timeout_s: float) -> list[Row]:
    """Returns measured bandwidth of an all-reduce and an all-to-all on every mesh axis; every rank must call it.

    Each collective is bounded by ``timeout_s``.

    Args:
        config: the layout.
        device_type: ``"cpu"``, ``"cuda"``, ...
        nbytes: size of the tensor on every rank.
        timeout_s: longest wait for one collective.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    num_nodes = max(1, dist.get_world_size() // per_node)
    sizes = config.resolve(world_size=dist.get_world_size(), num_nodes=num_nodes)
    meshes = build_meshes(sizes, device_type, timedelta(seconds=timeout_s))
    rows: list[Row] = [("axis", "ranks", "links", "collective", "time", "bus bandwidth")]
    for axis, size in sizes.as_dict().items():
        if size == 1:
            continue
        group = meshes.world[axis].get_group()
        links = "between nodes" if crosses_nodes(sizes, axis, per_node) else "within a node"
        for name, share in (("all_reduce", 2 * (size - 1) / size), ("all_to_all", (size - 1) / size)):
            seconds = _slowest(_collective(name, group, nbytes, device_type), meshes.control)
            speed = f"{share * nbytes / seconds / 1e9:.3g} GB/s"
            rows.append((axis, str(size), links, name, f"{seconds * 1e3:.3g} ms", speed))
    return rows


def advice(sizes: AxisSizes, ranks_per_node: int, num_nodes: int) -> list[str]:
    """Returns what the mesh should be told about its links."""
    found = []
    if crosses_nodes(sizes, "tensor_parallel", ranks_per_node):
        found.append(
            "tensor_parallel crosses nodes: it talks several times per layer and waits each time; "
            f"keep its size at most {ranks_per_node}, the ranks of a node"
        )
    if crosses_nodes(sizes, "context_parallel", ranks_per_node):
        found.append("context_parallel crosses nodes: it exchanges activations in every layer")
    if num_nodes > 1 and crosses_nodes(sizes, "data_parallel_shard", ranks_per_node):
        found.append(
            "data_parallel_shard crosses nodes: every unit is gathered over the network; if a copy of the state fits "
            f"on one node, data_parallel_shard_size={ranks_per_node} keeps that inside (pardist_hybrid does)"
        )
    return found or ["nothing to change: the axes that talk most stay within a node"]


def _backends() -> dict[str, bool]:
    return {
        "nccl": dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }


def _device_rows() -> list[Row]:
    if not torch.cuda.is_available():
        return [("devices", f"none; the host has {os.cpu_count()} cores")]
    rows: list[Row] = [("cuda", str(torch.version.cuda)), ("nccl", ".".join(map(str, torch.cuda.nccl.version())))]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        peers = [
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        text = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        rows.append((f"device {index}", f"{text}, reaches {peers or 'no other'} directly"))
    return rows


def _link_rows() -> list[Row]:
    rows: list[Row] = []
    for interface in sorted(Path("/sys/class/net").glob("*")) if Path("/sys/class/net").is_dir() else []:
        state = _read(interface / "operstate")
        speed = _read(interface / "speed")
        known = speed.isdigit()
        rows.append((f"network {interface.name}", f"{state}, {speed} Mbit/s" if known else f"{state}, speed unknown"))
    infiniband = Path("/sys/class/infiniband")
    cards = sorted(card.name for card in infiniband.glob("*")) if infiniband.is_dir() else []
    rows.append(("infiniband", ", ".join(cards) or "none visible"))
    if torch.cuda.is_available() and shutil.which("nvidia-smi"):
        rows += [("topology", line) for line in _output(["nvidia-smi", "topo", "-m"]).splitlines() if line.strip()]
    return rows


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a link that is down refuses to tell its speed
        return "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"


def _collective(name: str, group: Any, nbytes: int, device_type: str) -> Callable[[], None]:
    size = dist.get_world_size(group)
    numel = max(1, nbytes // 4 // size) * size
    device = local_device(device_type)
    tensor = torch.zeros(numel, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    out = torch.empty_like(tensor)
    return lambda: dist.all_to_all_single(out, tensor, group=group)


def _slowest(run: Callable[[], None], control: Any, repeats: int = 3) -> float:
    """Returns the seconds of one call on the slowest rank, the first (which connects) left out."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    seconds = torch.tensor((time.perf_counter() - started) / repeats, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return float(seconds)
