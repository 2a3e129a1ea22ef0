"""FLOPs of one operator call: torch's own formulas, and those torch has none for.

One multiply-add counts as 2. The formulas are those of ``torch.utils.flop_counter``, so that totals agree with
``FlopCounterMode(custom_mapping=extra_formulas())`` on a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_pardist.base.torch_api import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    CUDNN_RNN,
    CUDNN_RNN_BACKWARD,
    GROUPED_MM,
)

aten = torch.ops.aten

Formula = Callable[..., int]
Shape = Sequence[int]


@cache
def formulas() -> Mapping[Any, Formula]:
    """Returns operator -> function of its arguments and ``out_val`` to FLOPs, for every operator that is counted."""
    return FlopCounterMode(display=False, custom_mapping=extra_formulas()).flop_registry


def extra_formulas() -> dict[Any, Formula]:
    """Returns the formulas (shapes to FLOPs) that torch's counter lacks, in the form its ``custom_mapping`` takes."""
    extra: dict[Any, Formula] = {
        CPU_ATTENTION: _attention,
        CPU_ATTENTION_BACKWARD: _attention_backward,
        GROUPED_MM: _grouped_mm,
        aten.mkldnn_rnn_layer: _mkldnn_rnn,
        aten.mkldnn_rnn_layer_backward: _mkldnn_rnn_backward,
        CUDNN_RNN: _cudnn_rnn,
        CUDNN_RNN_BACKWARD: _cudnn_rnn_backward,
    }
    known = FlopCounterMode(display=False).flop_registry
    return {operator: formula for operator, formula in extra.items() if operator not in known}


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """FLOPs of the CPU kernel, counted as torch counts the CUDA kernels: a causal mask saves nothing."""
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad_out, query, key, value)


def _grouped_mm(mat_a: Shape, mat_b: Shape, *args: Any, **kwargs: Any) -> int:
    """FLOPs when every row (or column, or inner index) belongs to some group."""
    batches = mat_a[0] if len(mat_a) == len(mat_b) == 3 else 1
    return 2 * batches * mat_a[-2] * mat_a[-1] * mat_b[-1]


def _mkldnn_rnn(x: Shape, input_weight: Shape, hidden_weight: Shape, *args: Any, **kwargs: Any) -> int:
    """FLOPs of one recurrent layer in one direction: two products per time step and row."""
    return _products(x, [input_weight, hidden_weight])


def _mkldnn_rnn_backward(x: Shape, input_weight: Shape, hidden_weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * _products(x, [input_weight, hidden_weight])


def _cudnn_rnn(x: Shape, weights: Sequence[Shape], *args: Any, **kwargs: Any) -> int:
    """FLOPs of all layers and directions, from the list of their weights and biases."""
    return _products(x, weights)


def _cudnn_rnn_backward(x: Shape, weights: Sequence[Shape], *args: Any, **kwargs: Any) -> int:
    return 2 * _products(x, weights)


def _products(x: Shape, weights: Sequence[Shape]) -> int:
    """FLOPs of ``x`` (time and rows in its first two dims) times each weight that is a matrix."""
    return 2 * x[0] * x[1] * sum(prod(weight) for weight in weights if len(weight) == 2)
