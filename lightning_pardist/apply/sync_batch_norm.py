"""Batch norm over the samples of all data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.base.batch_norm import is_batch_norm, is_synchronised
from lightning_pardist.base.errors import message
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
        if has_own_forward(
            super(OverAllRanks, type(self)).forward
        ):  # a norm that does more, such as an activation behind it
            with _BatchNormOf(self):
                return super().forward(input)
        return self.normalised(input, None)

    def normalised(self: Any, input: Tensor, momentum: float | None) -> Tensor:
        """Returns the normalised input; ``momentum`` is what the module's own code gives, which has counted already."""
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
            self._update_running(mean.detach(), var.detach(), count, momentum)
        out = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _update_running(self: Any, mean: Tensor, var: Tensor, count: Tensor, momentum: float | None) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        if momentum is None:
            self.num_batches_tracked.add_(1)
            # momentum=None means the plain average over all batches so far.
            momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _BatchNormOf(TorchFunctionMode):
    """Answers the call of ``F.batch_norm`` in a norm's own forward with the one over all ranks."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._norm = norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(_ARGUMENTS, args)) | (kwargs or {})
        if func is F.batch_norm and given.get("training"):
            return self._norm.normalised(given["input"], given.get("momentum", 0.1))
        return func(*args, **(kwargs or {}))


_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def has_own_forward(forward: Any) -> bool:
    """Returns True for a forward that is not torch's: torch's SyncBatchNorm would replace all that it does."""
    return forward not in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


def convert_batch_norms(module: nn.Module, meshes: Meshes) -> None:
    """Makes every batch norm below ``module`` one over all data ranks, in place.

    Names, parameters and buffers stay what they are, so checkpoints do not change.
    """
    if meshes.data_parallel_size == 1:
        return
    group = meshes.data_parallel_group
    if meshes.world.device_type != "cpu":
        _refuse_own_forwards(module)
        nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group=group)
        return
    for child in module.modules():
        if is_batch_norm(child) and not is_synchronised(child):
            cls = type(child)
            child.__class__ = type(f"Sync{cls.__name__}", (OverAllRanks, cls), {})
            child.process_group = group  # type: ignore[assignment]  # a plain attribute of this module


def _refuse_own_forwards(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if is_batch_norm(child) and has_own_forward(type(child).forward):
            raise ValueError(
                message(
                    "sync_batchnorm=True puts torch's SyncBatchNorm in the place of every batch norm on this device.",
                    got=f"{name} is a {type(child).__name__}, whose own forward does more",
                    source="Trainer(sync_batchnorm=True) and the module",
                    change="convert it in configure_model (timm has layers.convert_sync_batchnorm), or leave it out",
                )
            )
