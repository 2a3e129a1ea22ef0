"""Gradients that no rank has: None as in one process, not zeros.

Ranks whose samples take different branches use different parameters. So that their reductions match, a parameter that a
rank did not use takes part with zeros. If no rank used it, the sum is zero too, and an optimizer would let it decay or
drift by its momentum, which one process leaves alone.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist import torch_dist_api
from lightning_pardist.mesh import local_device
from lightning_pardist.parallel_model import ParallelModel


class GradientUse:
    """Notes over one accumulation window which sharded parameters got a gradient on this rank."""

    def __init__(self, model: ParallelModel) -> None:
        assert model.meshes is not None
        self._control = model.meshes.control
        self._records = list(torch_dist_api.fsdp_parameters(model.module))
        self._watched: set[int] = set()
        self._used = [False] * len(self._records)  # the hooks hold this very list
        self._was_none: list[bool] | None = None

    def before_backward(self) -> None:
        """Watches what is gathered by now and, at the start of a window, notes which gradients are None."""
        for index, record in enumerate(self._records):
            whole = torch_dist_api.whole_parameter(record)
            if index not in self._watched and whole is not None and whole.requires_grad:
                whole.register_post_accumulate_grad_hook(partial(_note, self._used, index))
                self._watched.add(index)
        if self._was_none is None:
            self._was_none = [record.sharded_param.grad is None for record in self._records]

    def end_window(self) -> None:
        """Sets gradients back to None that no rank contributed to; one small collective."""
        used = torch.tensor(self._used, dtype=torch.uint8)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._control)
        was_none = self._was_none or [False] * len(self._records)
        for record, anywhere, before in zip(self._records, used.tolist(), was_none, strict=True):
            if before and not anywhere:
                record.sharded_param.grad = None
        self._used[:] = [False] * len(self._records)
        self._was_none = None


def _note(used: list[bool], index: int, _parameter: Tensor) -> None:
    # A hook of autograd lives in C++, where the garbage collector sees no cycle: this one must not lead to the module.
    used[index] = True


class UsedInStep:
    """Notes which sharded parameters got a gradient in a pipeline's step on any data rank, before it is reduced."""

    def __init__(self, model: ParallelModel) -> None:
        assert model.meshes is not None
        self._records = list(torch_dist_api.fsdp_parameters(model.module))
        self._was_none = [record.sharded_param.grad is None for record in self._records]
        used = torch.tensor([torch_dist_api.has_whole_gradient(r) for r in self._records], dtype=torch.uint8)
        used = used.to(local_device(model.meshes.world.device_type))
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=model.meshes.data_parallel_group)
        self._used = used.tolist()

    def drop_unused(self) -> None:
        """Sets gradients back to None that no rank contributed to."""
        for record, anywhere, before in zip(self._records, self._used, self._was_none, strict=True):
            if before and not anywhere:
                record.sharded_param.grad = None
