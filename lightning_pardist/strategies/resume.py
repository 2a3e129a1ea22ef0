"""Random generators of a run that is resumed: set back on the same layout, seeded anew on another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.seed import seed_everything

from lightning_pardist.base.log import get_logger

log = get_logger(__name__)


def generator_states() -> dict[str, Any]:
    """Returns the states of the generators of python, numpy, torch and the devices, as plain data and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = _numpy()
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        keys = torch.from_numpy(keys.astype("int64"))
        states["numpy"] = [str(name), keys, int(position), int(has_gauss), float(gauss)]
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Sets the generators back to what ``generator_states`` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    numpy = _numpy()
    if "numpy" in states and numpy is not None:
        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))


def reseed(seed: int, step: int, rank: int) -> None:
    """Seeds all generators anew for a layout that the saved states do not fit; equal runs get equal numbers."""
    value = (seed + 1_000_003 * step + 7_919 * rank) % 2**32
    seed_everything(value, workers=False, verbose=False)
    log.warning(
        "the checkpoint has no generator states for this layout: random generators are seeded anew from its seed %d "
        "and step %d",
        seed,
        step,
    )


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
