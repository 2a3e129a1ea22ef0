"""Reductions of single tensors, as Lightning asks for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

_OPS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce_over(tensor: Tensor, group: Any, reduce_op: ReduceOp | str | None, device: torch.device) -> Tensor:
    """Returns the reduced tensor on its own device; the input is left as it is.

    A mean of integers comes back in floating point: cut to an integer it would be wrong.

    Raises:
        ValueError: for an operation that is not known.
    """
    name = _name(reduce_op)
    averaging = name in ("mean", "avg")
    work = tensor.detach().to(device, copy=True).contiguous()
    if averaging and not (work.is_floating_point() or work.is_complex()):
        work = work.to(torch.get_default_dtype())
    dist.all_reduce(work, op=_OPS[name], group=group)
    if averaging:
        work /= dist.get_world_size(group)
    return work.to(tensor.device)


def _name(reduce_op: ReduceOp | str | None) -> str:
    if reduce_op is None:
        return "sum"
    name = reduce_op.lower() if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1].lower()
    if name not in _OPS:
        raise ValueError(f"unknown reduction {reduce_op!r}; known are {', '.join(_OPS)}")
    return name
