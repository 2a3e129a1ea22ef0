"""Debug mode: before every step the ranks compare what they are about to do, and the first that differs is named."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_pardist.base.axes import PIPELINE_PARALLEL
from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import tree_flatten
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.meeting import wait_for_keys
from lightning_pardist.torch_dist_api import default_store, sequence_number


class RanksDifferError(RuntimeError):
    """Ranks are about to take different steps."""


@dataclass(frozen=True)
class Fingerprint:
    """What one rank is about to do."""

    step: int
    batch_index: int
    batch: int
    """Checksum of the batch."""
    collectives: dict[str, tuple[int, int]]
    """Axis -> the first rank of this rank's group, and collectives that were started on the group so far. Stages of a
    pipeline are left out: they send and receive as the schedule tells each."""
    data_rank: int
    """Ranks of one data rank must read the same batch."""


class Fingerprints:
    """Compares fingerprints through the store, so that a rank that does not come is named too."""

    def __init__(self, meshes: Meshes, timeout_s: float) -> None:
        self._meshes = meshes
        self._timeout_s = timeout_s
        self._rank = torch.distributed.get_rank()
        self._world_size = torch.distributed.get_world_size()
        self._store = default_store()
        self._count = 0

    def compare(self, step: int, batch_index: int, batch: Any) -> None:
        """Exchanges and checks; every rank must call it.

        Raises:
            RanksDifferError: on all ranks with the first that differs, or on those that came with those that did not.
        """
        own = Fingerprint(step, batch_index, checksum(batch), self._collectives(), self._meshes.data_parallel_rank)
        prefix = f"pardist/step/{self._count}"
        self._store.set(f"{prefix}/{self._rank}", json.dumps(asdict(own)))
        keys = {rank: f"{prefix}/{rank}" for rank in range(self._world_size)}
        absent = wait_for_keys(self._store, keys, time.monotonic() + self._timeout_s)
        if absent:
            raise self._error(
                f"rank(s) {', '.join(map(str, absent))} did not come to step {step} in {self._timeout_s:g} s"
            )
        if self._count > 1:  # everybody has read what is two steps old: they all came to the step after it
            self._store.delete_key(f"pardist/step/{self._count - 2}/{self._rank}")
        self._count += 1
        everyone = [Fingerprint(**json.loads(self._store.get(keys[rank]))) for rank in keys]
        for rank, other in enumerate(everyone):
            for text in _differences(everyone, rank, other):
                raise self._error(text)

    def _collectives(self) -> dict[str, tuple[int, int]]:
        mesh = self._meshes.world
        device = torch.device(mesh.device_type)
        found = {}
        for axis in mesh.mesh_dim_names or ():
            if mesh[axis].size() > 1 and axis != PIPELINE_PARALLEL:
                group = mesh[axis].get_group()
                found[axis] = min(torch.distributed.get_process_group_ranks(group)), sequence_number(group, device)
        return found

    def _error(self, got: str) -> RanksDifferError:
        return RanksDifferError(
            message(
                "All ranks must take the same steps, and ranks that share samples must read the same batch.",
                got=got,
                source="DiagnosisOptions(compare_steps=True), before a training step",
                change="look for code that depends on the rank: data, random numbers, early exits, own collectives",
            )
        )


def _differences(everyone: list[Fingerprint], rank: int, other: Fingerprint) -> Iterator[str]:
    first = everyone[0]
    if (other.step, other.batch_index) != (first.step, first.batch_index):
        yield (
            f"rank {rank} is at step {other.step}, batch {other.batch_index}; "
            f"rank 0 at step {first.step}, batch {first.batch_index}"
        )
    for axis, (in_group, count) in other.collectives.items():
        _, expected = everyone[in_group].collectives[axis]
        if count != expected:
            yield f"rank {rank} has started {count} collectives on {axis}, rank {in_group} {expected}"
    peer = next(r for r, candidate in enumerate(everyone) if candidate.data_rank == other.data_rank)
    if other.batch != everyone[peer].batch:
        yield f"rank {rank} has another batch than rank {peer} (checksums {other.batch}, {everyone[peer].batch})"


def checksum(batch: Any) -> int:
    """Returns a number that differs if any tensor of a batch differs; strings and numbers count too."""
    total = 0
    for leaf in tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0]:
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().view(-1)
            total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", total)
        else:
            total = zlib.crc32(repr(leaf).encode(), total)
    return total
