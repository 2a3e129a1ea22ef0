"""Averages gradients that no torch engine averages: after manual backward passes, and of held scalars."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_pardist.parallel_model import ParallelModel


def average_gradients(model: ParallelModel, *, agree: bool) -> None:
    """Averages all gradients of a replicated module over the data ranks, in place, one collective per dtype.

    Averaging again what was averaged before changes nothing, so several backward passes may add up between two calls.

    Args:
        model: the replicated module.
        agree: first exchange which parameters have a gradient, so that ranks whose code took another branch join in
            with zeros instead of leaving the others waiting.
    """
    assert model.meshes is not None
    group, size = model.meshes.data_parallel_group, model.meshes.data_parallel_size
    shown = [held.local for held in model.shards] or list(model.module.parameters())
    parameters = [p for p in shown if p.requires_grad]
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    if agree:
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=model.meshes.control)
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter, any_rank_has in zip(parameters, have.tolist(), strict=True):
        if not any_rank_has:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype[parameter.grad.dtype].append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=group)
        flat /= size
        for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))


def average_scalars(model: ParallelModel) -> None:
    """Moves gradients of held scalars from the tensors that computed to the DTensors that optimizers see, averaged."""
    held = [h for h in model.scalars if h.stored.requires_grad]
    if not held:
        return
    assert model.meshes is not None
    device = held[0].local.device
    rows = torch.zeros(2, len(held), dtype=torch.float64, device="cpu")
    for column, scalar in enumerate(held):
        if scalar.local.grad is not None:
            rows[0, column], rows[1, column] = scalar.local.grad.double(), 1.0
    rows = rows.to(device)
    dist.all_reduce(rows, group=model.meshes.data_parallel_group)
    rows[0] /= model.meshes.data_parallel_size
    mesh = model.meshes.sharding()
    for column, scalar in enumerate(held):
        scalar.local.grad = None
        if rows[1, column] == 0:
            continue
        value = rows[0, column].to(scalar.local.dtype)
        gradient = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        scalar.stored.grad = gradient if scalar.stored.grad is None else scalar.stored.grad + gradient
