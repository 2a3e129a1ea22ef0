"""Collectives of the tensor axis that autograd knows: each is the other's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_pardist.base.torch_api import under_dispatch_mode


@dataclass(frozen=True)
class Alone:
    """In the place of a group: one rank's code runs by itself, and what the others would give is made up."""

    rank: int
    note: Callable[[str, int], None] = lambda _kind, _nbytes: None
    """Told of every collective that would run: its kind, and the bytes of the whole tensor."""


Group: TypeAlias = ProcessGroup | Alone


def copy_to_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Returns a whole tensor for use on every rank's share; its gradient is summed over the ranks."""
    return _CopyToRanks.apply(tensor, group) if torch.is_grad_enabled() and tensor.requires_grad else tensor


def sum_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of every rank's part, whole on all of them; the parts' gradient is that of the sum.

    The part itself becomes the sum: it must be nobody else's, such as the result of a matmul. Under a dispatch mode it
    stays as it is: selective recomputation keeps results of matmuls, and would find the sum in the place of a part.
    """
    return _SumOverRanks.apply(tensor, group)


def gather_from_ranks(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns every rank's part side by side; each part's gradient is cut from that of the whole.

    Args:
        tensor: this rank's part.
        dim: where the parts lie side by side.
        lengths: of every rank's part along ``dim``.
        group: the tensor axis.
    """
    return _GatherFromRanks.apply(tensor, dim, lengths, group)


def split_for_ranks(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns this rank's part of a tensor that all ranks hold; the parts' gradients are gathered."""
    return _SplitForRanks.apply(tensor, dim, lengths, group)


def open_sequence(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns every rank's part side by side, for use on shares: each part's gradient is summed over the ranks."""
    return _OpenSequence.apply(tensor, dim, lengths, group)


def close_sequence(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns this rank's part of the sum of every rank's tensor; the parts' gradients are gathered."""
    return _CloseSequence.apply(tensor, dim, lengths, group)


class _SplitForRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
        rank = rank_in(group)
        ctx.call = dim, lengths, group
        return tensor.narrow(dim, sum(lengths[:rank]), lengths[rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered(gradient, *ctx.call), None, None, None


class _OpenSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
        ctx.call = dim, lengths, group
        return gathered(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return scattered(gradient, *ctx.call), None, None, None


class _CloseSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
        ctx.call = dim, lengths, group
        return scattered(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gathered(gradient, *ctx.call), None, None, None


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        if not tensor.is_contiguous() or under_dispatch_mode():
            return summed(tensor, group)
        all_reduce(tensor, group)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
        rank = rank_in(group)
        ctx.cut = dim, sum(lengths[:rank]), lengths[rank]
        return gathered(tensor, dim, lengths, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(*ctx.cut).contiguous(), None, None, None


def summed(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum over ranks as a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    all_reduce(total, group)
    return total


def gathered(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns every rank's part side by side; parts may differ in length."""
    size, longest = len(lengths), max(lengths)
    moved = tensor.movedim(dim, 0)
    part = moved.new_zeros((longest, *moved.shape[1:])) if moved.shape[0] != longest else moved.contiguous()
    if moved.shape[0] != longest:
        part[: moved.shape[0]] = moved
    out = part.new_empty((size * longest, *part.shape[1:]))
    _all_gather(out, part, group)
    if min(lengths) != longest:
        out = torch.cat([out[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)])
    return out.movedim(0, dim).contiguous()


def scattered(tensor: Tensor, dim: int, lengths: tuple[int, ...], group: Group) -> Tensor:
    """Returns this rank's part of the sum over ranks; parts may differ in length."""
    size, longest, rank = len(lengths), max(lengths), rank_in(group)
    moved = tensor.movedim(dim, 0)
    if min(lengths) == longest:
        whole = moved.contiguous()
    else:
        whole = moved.new_zeros((size * longest, *moved.shape[1:]))
        for other, part in enumerate(moved.split(list(lengths))):
            whole[other * longest : other * longest + lengths[other]] = part
    out = whole.new_empty((longest, *whole.shape[1:]))
    _reduce_scatter(out, whole, group)
    return out[: lengths[rank]].movedim(0, dim).contiguous()


def rank_in(group: Group) -> int:
    """Returns this rank's place in the group."""
    return group.rank if isinstance(group, Alone) else dist.get_rank(group)


def all_reduce(tensor: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> None:
    """Makes a tensor the sum (or what ``op`` says) of every rank's, in place."""
    if isinstance(group, Alone):
        group.note("all_reduce", tensor.nbytes)
    else:
        dist.all_reduce(tensor, op=op, group=group)


def _all_gather(out: Tensor, part: Tensor, group: Group) -> None:
    if isinstance(group, Alone):
        group.note("all_gather", out.nbytes)
        out.view(-1, *part.shape).copy_(part)
    else:
        dist.all_gather_into_tensor(out, part, group=group)


def _reduce_scatter(out: Tensor, whole: Tensor, group: Group) -> None:
    if isinstance(group, Alone):
        group.note("reduce_scatter", whole.nbytes)
        out.copy_(whole[: out.shape[0]])
    else:
        dist.reduce_scatter_tensor(out, whole, group=group)
