"""The live mesh: the only maker of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_pardist import torch_dist_api
from lightning_pardist.base import axes
from lightning_pardist.specs.config import AxisSizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Meshes:
    """A device mesh with one axis per parallelism, and the views of it that the steps need."""

    world: DeviceMesh
    """All axes, outer to inner; size-1 axes included. ``world["data_parallel"]`` is the joint data axis."""
    data_parallel: DeviceMesh
    """1-D mesh of the ranks that read different samples, over the replicate and shard axes."""
    model: DeviceMesh
    """1-D mesh of the ranks that together hold one copy of the model: all axes but the replicas."""
    control: ProcessGroup
    """World-wide group for small host messages; on a GPU run these then never wait for device work."""
    pipeline_control: ProcessGroup | None = None
    """The same among the stages of one pipeline; None without pipeline parallelism."""

    @property
    def sizes(self) -> AxisSizes:
        """Sizes as the live mesh has them."""
        return AxisSizes(**{axis: self.world[axis].size() for axis in axes.AXES})

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return int(self.data_parallel.get_local_rank())

    @property
    def data_parallel_size(self) -> int:
        """Number of shares the samples are dealt into."""
        return int(self.data_parallel.size())

    @property
    def data_parallel_group(self) -> ProcessGroup:
        """Process group of ``data_parallel``, for sums over samples."""
        return self.data_parallel.get_group()

    @property
    def tensor(self) -> DeviceMesh:
        """1-D mesh of the ranks that share each matrix."""
        return self.world[axes.TENSOR_PARALLEL]

    @property
    def pipeline_rank(self) -> int:
        """This rank's place along the pipeline axis."""
        return int(self.world[axes.PIPELINE_PARALLEL].get_local_rank())

    @property
    def pipeline_group(self) -> ProcessGroup:
        """Process group of the stages of one pipeline."""
        return self.world[axes.PIPELINE_PARALLEL].get_group()

    def sharding(self) -> DeviceMesh:
        """Mesh for fully_shard: 1-D over shards, or 2-D ``(replicate, shard)`` when copies exist."""
        if self.world[axes.DATA_PARALLEL_REPLICATE].size() == 1:
            return self.world[axes.DATA_PARALLEL_SHARD]
        return self.world[axes.DATA_PARALLEL_REPLICATE, axes.DATA_PARALLEL_SHARD]


def build_meshes(sizes: AxisSizes, device_type: str, timeout: timedelta | None = None) -> Meshes:
    """Returns the meshes over the already initialised default process group.

    Every rank must call it: all ranks make all groups in the same order.

    Args:
        sizes: ranks along every axis; must multiply to the world size.
        device_type: ``"cpu"``, ``"cuda"``, ...
        timeout: bound on every collective of the groups made here; None keeps torch's default.
    """
    assert sizes.world_size == dist.get_world_size(), (sizes, dist.get_world_size())
    world = init_device_mesh(device_type, tuple(sizes.as_dict().values()), mesh_dim_names=axes.AXES)
    data_parallel = torch_dist_api.flatten_axes(world, axes.DATA_AXES, name=axes.DATA_PARALLEL)
    model = torch_dist_api.flatten_axes(world, axes.MODEL_AXES, name=axes.MODEL)
    if timeout is not None:
        for mesh in (*(world[axis] for axis in axes.AXES), data_parallel, model):
            torch_dist_api.set_group_timeout(mesh.get_group(), timeout)
    control = _control_group(device_type, timeout)
    return Meshes(
        world=world,
        data_parallel=data_parallel,
        model=model,
        control=control,
        pipeline_control=_pipeline_control_group(world, timeout),
    )


_shared: dict[ProcessGroup, dict[tuple[AxisSizes, str, timedelta | None], Meshes]] = {}


def shared_meshes(sizes: AxisSizes, device_type: str, timeout: timedelta | None = None) -> Meshes:
    """Returns what ``build_meshes`` returns, made once per default process group.

    torch keeps every group until the default one is destroyed. A program that makes many Trainers in one process would
    gather the groups of all of them: threads and sockets each, on a GPU communicators with their buffers.

    Every rank must call it, with the same arguments in the same order.
    """
    default = dist.group.WORLD
    assert default is not None
    for ended in _shared.keys() - {default}:
        del _shared[ended]
    made = _shared.setdefault(default, {})
    key = (sizes, device_type, timeout)
    if key not in made:
        made[key] = build_meshes(sizes, device_type, timeout)
    return made[key]


def stage_groups(meshes: Meshes, stage_sets: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], ProcessGroup]:
    """Returns a group for every given set of pipeline ranks that this rank is in, among its own pipeline.

    Every rank must call it with the same sets in the same order.
    """
    found: dict[tuple[int, ...], ProcessGroup] = {}
    lines = meshes.world.mesh.reshape(meshes.world[axes.PIPELINE_PARALLEL].size(), -1)
    for stages in stage_sets:
        for line in range(lines.shape[1]):
            ranks = [int(lines[stage, line]) for stage in stages]
            group = dist.new_group(ranks, group_desc="pardist_shared_between_stages")
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                found[stages] = group
    return found


def private_host_group(meshes: Meshes, timeout_s: float) -> ProcessGroup:
    """Returns a new world-wide host group for one user alone, such as a writer in a thread of its own.

    Every rank must call it at the same point, and ``end_private_group`` when it has no more to say.
    """
    ranks = list(range(meshes.sizes.world_size))
    group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="pardist_private")
    assert isinstance(group, dist.ProcessGroup)
    return group


def end_private_group(group: ProcessGroup) -> None:
    """Gives back the threads and sockets of a group that only its user knows; every rank does so once it is through."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def _control_group(device_type: str, timeout: timedelta | None) -> ProcessGroup:
    default = dist.group.WORLD
    assert default is not None
    if device_type == "cpu" or "gloo" in dist.get_backend(default):
        return default
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _pipeline_control_group(world: DeviceMesh, timeout: timedelta | None) -> ProcessGroup | None:
    size = world[axes.PIPELINE_PARALLEL].size()
    if size == 1:
        return None
    if world.device_type == "cpu":
        return world[axes.PIPELINE_PARALLEL].get_group()
    mine: ProcessGroup | None = None
    lines = world.mesh.reshape(size, -1)
    for line in range(lines.shape[1]):
        ranks = [int(rank) for rank in lines[:, line]]
        group = dist.new_group(ranks, backend="gloo", timeout=timeout, group_desc="pardist_pipeline_control")
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


def local_device(device_type: str) -> torch.device:
    """Returns the device this rank computes on."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
