"""Operators whose fake kernel differs from the real one in what it takes or gives, and what the fake run does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lightning_pardist.base.torch_api import GROUPED_MM, without_dispatch_modes

aten = torch.ops.aten


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns an empty tensor of the shape that ``torch.nn.functional.grouped_mm`` returns.

    torch 2.13's fake kernel takes bfloat16 only and wants CUDA's alignment, while the CPU and the CUDA fallback kernels
    take float32 and float16 too: without this rule every mixture of experts of transformers would fail in fp32.
    """
    if mat_a.dim() == 3 and mat_b.dim() == 3:
        shape = [mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]]
    elif mat_a.dim() == 2 and mat_b.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], mat_a.shape[0], mat_b.shape[1]]
    else:
        shape = [mat_a.shape[-2], mat_b.shape[-1]]
    return mat_a.new_empty(shape, dtype=out_dtype or mat_a.dtype)


def mkldnn_rnn_layer(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Returns the fake outputs of the CPU's recurrent layer with a workspace of the real size.

    The workspace holds every gate of every step for the backward pass, most of what the layer saves; torch's fake
    kernel gives it no elements. oneDNN alone knows its layout, which grows by the same amount with every time step.
    """
    *outputs, workspace = aten.mkldnn_rnn_layer.default(x, *args)
    training = args[-1]
    if not training:
        return (*outputs, workspace)
    input_weight, mode, hidden_size = args[0], args[8], args[9]
    one, two = (
        _rnn_workspace(steps, x.shape[1], x.shape[2], hidden_size, input_weight.shape[0], mode, x.dtype)
        for steps in (1, 2)
    )
    return (*outputs, workspace.new_empty(one + (x.shape[0] - 1) * (two - one)))


@cache
def _rnn_workspace(
    steps: int, rows: int, width: int, hidden: int, gates: int, mode: int, dtype: torch.dtype
) -> int:  # fmt: skip
    """Returns the elements of the workspace for a few time steps, from a real call on zeros."""
    with without_dispatch_modes():
        x, state = torch.zeros(steps, rows, width, dtype=dtype), torch.zeros(1, rows, hidden, dtype=dtype)
        weights = torch.zeros(gates, width, dtype=dtype), torch.zeros(gates, hidden, dtype=dtype)
        bias = torch.zeros(gates, dtype=dtype)
        sizes = (mode, hidden, 1, True, False, False, True)
        return aten.mkldnn_rnn_layer.default(x, *weights, bias, bias, state, state, False, [], *sizes)[3].numel()


RULES: dict[Any, Callable[..., Any]] = {
    GROUPED_MM.default: grouped_mm,
    aten.mkldnn_rnn_layer.default: mkldnn_rnn_layer,
}
