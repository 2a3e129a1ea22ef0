"""Accelerators and their links as data sheets have them, by name or by figures."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from lightning_pardist.base.errors import message

GIB = 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links, from the vendor's data sheet; peaks, not what a program reaches."""

    name: str
    memory_bytes: float
    flops_16: float | None = None
    """Dense FLOP/s of matrix products in bfloat16."""
    flops_32: float | None = None
    """The same in float32 (TF32 where it has it)."""
    node_bytes_per_second: float | None = None
    """One direction of the link between devices of a node."""
    network_bytes_per_second: float | None = None
    """One direction of a device's share of the network between nodes."""


DEVICES = {
    device.name: device
    for device in (
        Device(name="a100", memory_bytes=80 * GIB, flops_16=312e12, flops_32=156e12,
               node_bytes_per_second=300e9, network_bytes_per_second=25e9),
        Device(name="h100", memory_bytes=80 * GIB, flops_16=989e12, flops_32=494e12,
               node_bytes_per_second=450e9, network_bytes_per_second=50e9),
        Device(name="h200", memory_bytes=141e9, flops_16=989e12, flops_32=494e12,
               node_bytes_per_second=450e9, network_bytes_per_second=50e9),
        Device(name="b200", memory_bytes=180e9, flops_16=2250e12, flops_32=1125e12,
               node_bytes_per_second=900e9, network_bytes_per_second=50e9),
    )
}  # fmt: skip
"""SXM modules; the network is one 200 Gbit/s (A100) or 400 Gbit/s port per device."""


def parse_device(text: str) -> Device:
    """Returns the device that a text names: a word of the table, figures, or a word with some figures changed.

    Args:
        text: such as ``"h100"``, ``"memory=80GB"``, ``"memory=80GB,flops=989e12,node=450e9,network=50e9"`` or
            ``"h100,memory=94GB"``.

    Raises:
        ValueError: for an unknown name or figure; the message lists what there is.
    """
    name, *figures = [part.strip() for part in text.split(",")]
    if "=" in name:
        figures, device = [name, *figures], Device(name="custom", memory_bytes=0)
    elif name.lower() in DEVICES:
        device = DEVICES[name.lower()]
    else:
        raise _unknown(f"device {name!r}", text)
    fields_by_word = {
        "memory": ("memory_bytes",),
        "flops": ("flops_16", "flops_32"),
        "node": ("node_bytes_per_second",),
        "network": ("network_bytes_per_second",),
    }
    for figure in figures:
        word, _, value = figure.partition("=")
        if word not in fields_by_word:
            raise _unknown(f"figure {word!r}", text)
        number = _number(value, text)
        changed: dict[str, Any] = dict.fromkeys(fields_by_word[word], number)
        device = replace(device, **changed)
    if device.memory_bytes <= 0:
        raise _unknown("no memory", text)
    return device


def _number(text: str, whole: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)", text.strip(), flags=re.IGNORECASE)
    unit = found[2].upper() if found else ""
    if found is None or (unit and unit not in UNITS):
        raise _unknown(f"number {text!r}", whole)
    return float(found[1]) * UNITS.get(unit, 1)


def _unknown(got: str, text: str) -> ValueError:
    return ValueError(
        message(
            f"A device is one of {', '.join(DEVICES)}, or figures: memory=80GB,flops=989e12,node=450e9,network=50e9.",
            got=got,
            source=f"--device {text}",
            change="use one of these names, or give at least memory=",
        )
    )
