"""Running statistics of batch norm: each rank sees its own samples, evaluation and checkpoints want one answer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.base.batch_norm import is_batch_norm, is_synchronised
from lightning_pardist.parallel_model import ParallelModel


def averaged_statistics(model: ParallelModel) -> dict[str, Tensor]:
    """Returns name -> mean over data ranks of every running mean and variance, as new tensors.

    One collective for all of them. Nothing is written, so that a checkpoint can use it without touching the run.
    """
    named = dict(_statistics(model.module))
    if not named or model.meshes is None or model.meshes.data_parallel_size == 1:
        return named
    flat = torch.cat([t.reshape(-1).float() for t in named.values()])
    dist.all_reduce(flat, group=model.meshes.data_parallel_group)
    flat /= model.meshes.data_parallel_size
    parts = flat.split([t.numel() for t in named.values()])
    return {n: part.view_as(t).to(t.dtype) for (n, t), part in zip(named.items(), parts, strict=True)}


def average_statistics_(model: ParallelModel) -> None:
    """Replaces every running mean and variance by its mean over data ranks: all ranks then evaluate the same model."""
    averaged = averaged_statistics(model)
    for name, tensor in _statistics(model.module):
        tensor.copy_(averaged[name])


def _statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        if not is_batch_norm(child) or is_synchronised(child):
            continue
        for key in ("running_mean", "running_var"):
            tensor = getattr(child, key)
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor
