"""``F.multi_head_attention_forward`` on this rank's heads: torch's function counts heads itself, in ways of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.run.whole_sizes import numbers_of_rank
from lightning_pardist.specs.tensor_plan import TensorLayout

_NAMES = """
query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p
out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight q_proj_weight
k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal
""".split()
_DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True}


class Region(Protocol):
    """What opens and closes a region on the tensor axis."""

    def opened(self, tensor: Tensor) -> Tensor:
        """Returns an activation for use by all ranks."""

    def closed(self, tensor: Tensor, positions: int | None = None) -> Tensor:
        """Returns the sum over the ranks, or this rank's positions of it."""


def attention_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every argument of torch's function by name."""
    return {name: _DEFAULTS.get(name) for name in _NAMES} | dict(zip(_NAMES, args)) | dict(kwargs)


def attend_with_own_heads(
    given: Mapping[str, Any], layout: TensorLayout, rank: int, region: Region
) -> tuple[Tensor, Tensor | None]:
    """Returns the output, whole on every rank, and weights that nobody may use.

    A region is only formed where the weights are returned in vain: they would be averaged over all heads. They come
    back as NaN, so that a use cannot go unseen.

    Args:
        given: the arguments of ``F.multi_head_attention_forward``; weights are this rank's.
        layout: of the weight of the queries.
        rank: on the tensor axis.
        region: the collectives.
    """
    assert given["bias_k"] is None and not given["add_zero_attn"] and given["static_k"] is None
    query: Tensor = given["query"]
    is_batched = query.dim() == 3
    head_dim = given["embed_dim_to_check"] // given["num_heads"]
    q, k, v = (_heads(x, head_dim, is_batched) for x in _projections(given, region))
    first = layout.stretches[rank][0][0] // head_dim
    mask, is_causal = _mask(given, slice(first, first + q.shape[1]), q)
    dropout = given["dropout_p"] if given["training"] else 0.0

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)

    if dropout:
        with numbers_of_rank(rank, q.device):
            out = attend()
    else:
        out = attend()
    joined = out.permute(2, 0, 1, 3).flatten(2)
    joined = joined if is_batched else joined.squeeze(1)
    result = region.closed(F.linear(joined, given["out_proj_weight"]), 0 if is_batched else None)
    if given["out_proj_bias"] is not None:
        result = result + given["out_proj_bias"]
    return result, _no_weights(given, q, k, is_batched) if given["need_weights"] else None


def _projections(given: Mapping[str, Any], region: Region) -> tuple[Tensor, ...]:
    inputs = [region.opened(given[name]) for name in ("query", "key", "value")]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
        if inputs[0] is inputs[1] is inputs[2]:
            return F.linear(inputs[0], given["in_proj_weight"], given["in_proj_bias"]).chunk(3, dim=-1)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases))


def _heads(x: Tensor, head_dim: int, is_batched: bool) -> Tensor:
    """Returns (rows, heads, positions, head_dim) of (positions, rows, features)."""
    x = x if is_batched else x.unsqueeze(1)
    return x.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3)


def _mask(given: Mapping[str, Any], own: slice, q: Tensor) -> tuple[Tensor | None, bool]:
    """Returns one additive mask, and whether the causal form of attention needs none."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return None, True
    if mask is not None:
        mask = _additive(mask, q)
        if mask.dim() == 3:
            mask = mask.view(-1, given["num_heads"], *mask.shape[1:])[:, own]
    if padding is not None:
        padding = _additive(padding, q).view(q.shape[0], 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return mask, False


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))


def _no_weights(given: Mapping[str, Any], q: Tensor, k: Tensor, is_batched: bool) -> Tensor:
    shape = [q.shape[0], *([] if given["average_attn_weights"] else [given["num_heads"]]), q.shape[2], k.shape[2]]
    return q.new_full(shape if is_batched else shape[1:], float("nan"))
