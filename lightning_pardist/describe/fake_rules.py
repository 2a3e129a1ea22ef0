"""Operators whose fake kernel refuses what the real kernel takes, and what the fake run does instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_pardist.base.torch_api import GROUPED_MM


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


RULES: dict[Any, Callable[..., Any]] = {GROUPED_MM.default: grouped_mm}
