"""Gradients of weights that several stages hold: each has the part of its own code, the sum is the weight's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.torch_dtensor_api import as_dtensor, local_tensor


class SharedGradients:
    """Adds up gradients over the stages that hold a weight; a shard meets the same shard of the other stages."""

    def __init__(self, model: ParallelModel, groups: Mapping[tuple[int, ...], ProcessGroup]) -> None:
        assert model.pipeline is not None
        self._model = model
        rank = model.pipeline.rank
        self._by_group: dict[ProcessGroup, list[str]] = defaultdict(list)
        for name, ranks in model.pipeline.plan.shared_parameters:
            if rank in ranks:
                self._by_group[groups[ranks]].append(name)

    def add_up(self) -> None:
        """One collective per group and dtype; a weight that no stage has a gradient of keeps none."""
        for group, names in self._by_group.items():
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
            for name in names:
                parameter = self._model.module.get_parameter(name)
                if parameter.requires_grad:
                    by_dtype[parameter.dtype].append(parameter)
            for parameters in by_dtype.values():
                self._add_up(group, parameters)

    def _add_up(self, group: ProcessGroup, parameters: list[nn.Parameter]) -> None:
        locals_ = [_local_gradient(p) for p in parameters]
        have = torch.tensor([p.grad is not None for p in parameters], dtype=locals_[0].dtype)
        flat = torch.cat([*(g.reshape(-1) for g in locals_), have.to(locals_[0].device)])
        dist.all_reduce(flat, group=group)
        *sums, have = flat.split([*(g.numel() for g in locals_), len(parameters)])
        for parameter, own, total, holders in zip(parameters, locals_, sums, have.tolist(), strict=True):
            if not holders:
                parameter.grad = None
                continue
            own.copy_(total.view_as(own))
            if parameter.grad is None:
                parameter.grad = _like(parameter, own)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is not None:
        return local_tensor(parameter.grad)
    return torch.zeros_like(local_tensor(parameter.detach()))


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    return as_dtensor(local, parameter) if isinstance(parameter, DTensor) else local
