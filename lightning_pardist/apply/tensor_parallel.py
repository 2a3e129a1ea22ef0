"""Carries out the tensor-parallel part of a plan: every parameter becomes a DTensor on the tensor axis.

Whole parameters too, replicated: an optimizer group then holds parameters of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_pardist.parallel_model import HeldShard, ParallelModel
from lightning_pardist.specs.tensor_plan import TensorLayout
from lightning_pardist.torch_dtensor_api import UnitShard, compare_by_value, local_tensor, placed


class TensorCutter:
    """Cuts parameters of one module along the tensor axis, each once."""

    def __init__(self, model: ParallelModel) -> None:
        plan = model.plan
        assert plan.tensor is not None and model.meshes is not None
        compare_by_value()
        self._model = model
        self._mesh = model.meshes.tensor
        self._rank = int(self._mesh.get_local_rank())
        self._layouts = {layout.parameter: layout for layout in plan.tensor.layouts}
        # What another stage holds is NaN here, and takes no memory.
        apart = {*plan.data_parallel.ignored_parameters, *model.absent}
        self._names = {id(p): name for name, p in model.module.named_parameters() if name not in apart}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.module.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._owners.setdefault(id(parameter), []).append((module, key))

    def cut(self, top: nn.Module) -> None:
        """Replaces every parameter below ``top`` by a DTensor of the tensor axis; those of no dim stay."""
        for parameter in list(top.parameters()):
            if isinstance(parameter, DTensor) or id(parameter) not in self._names or not parameter.dim():
                continue
            stored = self._stored(parameter)
            for owner, key in self._owners[id(parameter)]:
                owner.register_parameter(key, stored)

    def cut_and_hold(self, top: nn.Module) -> None:
        """Does the same where fully_shard does not show whole parameters to the code: see ``HeldShard``."""
        waiting = list(top.parameters())[::-1]
        while waiting:
            parameter = waiting.pop()  # so that each whole is freed before the next is cut
            if isinstance(parameter, DTensor) or id(parameter) not in self._names:
                continue
            stored = self._stored(parameter)
            local = nn.Parameter(local_tensor(stored).detach(), requires_grad=parameter.requires_grad)
            held = HeldShard(self._owners[id(parameter)], stored, local)
            held.show_stored()
            self._model.shards.append(held)

    def _stored(self, parameter: nn.Parameter) -> nn.Parameter:
        layout = self._layouts.get(self._names[id(parameter)])
        if layout is None:
            stored = placed(parameter.detach(), self._mesh, None)
        else:
            local = local_part(parameter.detach(), layout, self._rank)
            stored = placed(local, self._mesh, (placement_of(layout), tuple(parameter.shape)))
        result = nn.Parameter(stored, requires_grad=parameter.requires_grad)
        result.__dict__.update(vars(parameter))  # marks that users and optimizers put on parameters
        return result


def placement_of(layout: TensorLayout) -> Shard | UnitShard:
    """Returns torch's own placement where it can name the layout, else ours."""
    return Shard(layout.dim) if layout.is_even else UnitShard(layout.dim, layout.stretches)


def local_part(whole: Tensor, layout: TensorLayout, rank: int) -> Tensor:
    """Returns a contiguous copy of what a rank holds."""
    parts = list(_parts(whole, layout, rank))
    if not parts:
        return whole.narrow(layout.dim, 0, 0).contiguous()
    return torch.cat(parts, layout.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


def _parts(whole: Tensor, layout: TensorLayout, rank: int) -> Iterator[Tensor]:
    for start, length in layout.stretches[rank]:
        yield whole.narrow(layout.dim, start, length)
