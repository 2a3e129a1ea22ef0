"""How much memory is free on a device."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on a device; of the host, what the container's limit leaves of them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, max(limit - int((_CGROUP / "memory.current").read_text(encoding="ascii")), 0))
    return free
