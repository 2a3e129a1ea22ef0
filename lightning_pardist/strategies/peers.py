"""Ranks that share samples: same batches, same random numbers.

Peers on the model axes (tensor, context, pipeline) compute one model's step together. A rank with another batch, or
other dropout, would silently train a patchwork.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.strategies.resume import generator_states, restore_generators

log = get_logger(__name__)


def has_peers(meshes: Meshes | None) -> bool:
    """Returns whether several ranks read the same samples."""
    return meshes is not None and meshes.sizes.world_size > meshes.data_parallel_size


def share_generators(meshes: Meshes) -> None:
    """Gives all peers the generator states of the first of them, where they differ; every rank must call."""
    mine = _states()
    digest = hashlib.blake2b(repr(_plain(mine)).encode(), digest_size=8).hexdigest()
    known = gather_objects((meshes.data_parallel_rank, digest), meshes)
    first: dict[int, str] = {}
    for data_rank, found in known:
        first.setdefault(data_rank, found)
    if all(first[data_rank] == found for data_rank, found in known):
        return
    everybody = gather_objects((meshes.data_parallel_rank, mine), meshes)
    states = next(states for data_rank, states in everybody if data_rank == meshes.data_parallel_rank)
    restore_generators({key: value for key, value in states.items() if key != "device"})
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
    log.info("ranks that share samples had different random states; all take those of the first of them")


def _states() -> dict[str, Any]:
    """Returns the states of this rank's generators; of devices its own only, for peers have others."""
    states = {key: value for key, value in generator_states().items() if key != "cuda"}
    if torch.cuda.is_available():
        states["device"] = torch.cuda.get_rng_state()
    return states


def check_same_batch(batch: Any, meshes: Meshes) -> None:
    """Refuses batches that differ between peers; every rank must call.

    Raises:
        ValueError: on all ranks, naming the ranks.
    """
    known = gather_objects((meshes.data_parallel_rank, _digest(batch)), meshes)
    by_data_rank: dict[int, set[int]] = {}
    for data_rank, found in known:
        by_data_rank.setdefault(data_rank, set()).add(found)
    odd = [data_rank for data_rank, found in by_data_rank.items() if len(found) > 1]
    if not odd:
        return
    ranks = [rank for rank, (data_rank, _) in enumerate(known) if data_rank == odd[0]]
    raise ValueError(
        message(
            "Ranks that share one copy of the model must see the same batch.",
            got=f"ranks {ranks} of data rank {odd[0]} have first batches that differ",
            source="the training data loader",
            change="deal samples by lightning_pardist.data_parallel_rank_and_size() instead of RANK and WORLD_SIZE, "
            "and draw augmentations from torch, numpy or random, whose states are equal on these ranks",
        )
    )


def _digest(value: Any) -> int:
    total = 0
    for tensor in _tensors(value):
        plain = tensor.detach().cpu().contiguous()
        total = zlib.crc32(f"{tuple(plain.shape)} {plain.dtype}".encode(), total)
        total = zlib.crc32(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"", total)
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_sparse and not value.is_nested and not value.is_quantized:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value
