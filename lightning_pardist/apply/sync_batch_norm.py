"""Batch norm over the samples of all data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.base.batch_norm import is_batch_norm, is_synchronised
from lightning_pardist.mesh import Meshes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of all ranks' gradients: every rank's loss depends on every input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class OverAllRanks(nn.Module):
    """Mixed into a batch norm on the host: training statistics are those of all data ranks.

    torch's SyncBatchNorm refuses tensors on the host; this computes the same there. Gradients flow through the
    statistics to all ranks' inputs.
    """

    process_group: ProcessGroup

    def forward(self: Any, input: Tensor) -> Tensor:  # torch's name
        """Returns the normalised input, of the same shape and dtype.

        Args:
            input: shape (rows, features, ...), this rank's rows.
        """
        if not (self.training or not self.track_running_stats):
            return super().forward(input)
        wide = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        rows = wide.new_tensor([input.numel() / input.shape[1]])
        first = _SumOverRanks.apply(torch.cat([wide.sum(dims), rows]), self.process_group)
        count = first[-1].detach()
        mean = first[:-1] / count
        centred = wide - mean.view(shape)
        var = _SumOverRanks.apply((centred * centred).sum(dims), self.process_group) / count
        if self.training and self.track_running_stats:
            self._update_running(mean.detach(), var.detach(), count)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _update_running(self: Any, mean: Tensor, var: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # momentum=None means the plain average over all batches so far.
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def convert_batch_norms(module: nn.Module, meshes: Meshes) -> None:
    """Makes every batch norm below ``module`` one over all data ranks, in place.

    Names, parameters and buffers stay what they are, so checkpoints do not change.
    """
    group = meshes.data_parallel_group
    if meshes.world.device_type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=group)
        return
    for child in module.modules():
        if is_batch_norm(child) and not is_synchronised(child):
            cls = type(child)
            child.__class__ = type(f"Sync{cls.__name__}", (OverAllRanks, cls), {})
            child.process_group = group  # type: ignore[assignment]  # a plain attribute of this module
