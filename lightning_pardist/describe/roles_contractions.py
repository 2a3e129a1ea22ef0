"""Rules for what contracts dims: linear layers in every form, attention, einsum, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_axes import Factors, cut, regroup, stop, unify
from lightning_pardist.describe.roles_state import Lookup, State, Tag, argument, pinned, results, rule
from lightning_pardist.describe.roles_trace import Event

_MIXED = "it is summed over outside a linear layer"
_FREE = "bcdefghijlpqrsuvwxyz"


def contract(state: State, operands: Sequence[tuple[Tag, str]], out: str, shape: Sequence[int]) -> list[Factors]:
    """Returns the dims of a product of tensors, written as in einsum.

    A dim that two activations contract is stopped; one that an activation and a weight contract makes a linear layer.

    Args:
        state: the tags.
        operands: each with one letter per dim.
        out: the letters of the result.
        shape: its shape.
    """
    sizes = dict(zip(out, shape, strict=True))
    kept: dict[str, Factors] = {letter: (size,) for letter, size in sizes.items()}
    for tag, letters in operands:
        for letter, dim in zip(letters, tag.dims, strict=True):
            if letter in out and torch.Size([_size(dim)]) == torch.Size([sizes[letter]]):
                kept[letter] = unify(dim, kept[letter]) if _size(dim) != 1 else kept[letter]
    summed = sorted({letter for _, letters in operands for letter in letters} - set(out))
    weights = [index for index, (tag, _) in enumerate(operands) if tag.weights]
    if len(operands) == 2 and len(weights) == 1:
        return _linear(state, operands[1 - weights[0]], operands[weights[0]], out, kept)
    for tag, letters in operands:
        for letter, dim in zip(letters, tag.dims, strict=True):
            if letter in summed:
                stop(dim, _MIXED)
    return [kept[letter] for letter in out]


def _linear(
    state: State, activation: tuple[Tag, str], weight: tuple[Tag, str], out: str, kept: dict[str, Factors]
) -> list[Factors]:
    (act, act_letters), (wgt, wgt_letters) = activation, weight
    contracted = [letter for letter in wgt_letters if letter in act_letters and letter not in out]
    made = tuple(f for letter in wgt_letters if letter in out and letter not in act_letters for f in kept[letter])
    for tag, letters in (activation, weight):
        for letter, dim in zip(letters, tag.dims, strict=True):
            if letter not in out and (letter not in contracted or len(wgt_letters) == 1):
                stop(dim, _MIXED)  # a vector is no layer: nothing would sum its products over the ranks
    act_factors = tuple(f for letter in contracted for f in act.dims[act_letters.index(letter)])
    wgt_factors = tuple(f for letter in contracted for f in wgt.dims[wgt_letters.index(letter)])
    uses = len(state.uses)
    state.contract_weight(act_factors, wgt_factors, made, wgt.weights)
    if not state.uses[uses].is_row:
        for letter in contracted:
            index = act_letters.index(letter)
            act.dims[index] = pinned(act.dims[index], f"it is the input of {', '.join(sorted(wgt.weights))}")
    return [kept[letter] for letter in out]


def _size(factors: Factors) -> int:
    total = 1
    for factor in factors:
        total *= factor if isinstance(factor, int) else factor.size
    return total


def _add_bias(state: State, bias: Any, dims: list[Factors], shape: Sequence[int]) -> list[Factors]:
    if not isinstance(bias, torch.Tensor):
        return dims
    return state.broadcast_tags([(dims, shape), (state.tag(bias).dims, bias.shape)], shape)


@rule("linear")
def _functional_linear(state: State, event: Event) -> None:
    x, weight, bias = argument(event, 0, "input"), argument(event, 1, "weight"), argument(event, 2, "bias")
    assert isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    batch = _FREE[: x.dim() - 1]
    made = "n" if weight.dim() == 2 else ""
    operands = [(state.tag(x), batch + "k"), (state.tag(weight), made + "k")]
    dims = contract(state, operands, batch + made, event.out.shape)
    made_of = state.weights_of([x, weight, *tensors_in([bias])])
    state.put(event.out, _add_bias(state, bias, dims, event.out.shape), made_of)


@rule("matmul", "bmm", "mm", "mv")
def _matmul(state: State, event: Event) -> None:
    a, b = argument(event, 0, "input", "self"), argument(event, 1, "other", "mat2", "vec")
    if event.name == "matmul" and not isinstance(a, torch.Tensor):
        raise NotImplementedError
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    state.put(event.out, _product(state, a, b, event.out), state.weights_of([a, b]))


@rule("rmatmul")
def _reversed_matmul(state: State, event: Event) -> None:
    b, a = event.args
    state.put(event.out, _product(state, a, b, event.out), state.weights_of([a, b]))


def _product(state: State, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Factors]:
    batch = max(a.dim() - 2, b.dim() - 2, 0)
    letters = _FREE[:batch]
    left = (letters[batch - max(a.dim() - 2, 0) :] + "m" if a.dim() > 1 else "") + "k"
    right = letters[batch - max(b.dim() - 2, 0) :] + "k" + ("n" if b.dim() > 1 else "")
    result = letters + ("m" if a.dim() > 1 else "") + ("n" if b.dim() > 1 else "")
    return contract(state, [(state.tag(a), left), (state.tag(b), right)], result, out.shape)


@rule("addmm", "baddbmm")
def _addmm(state: State, event: Event) -> None:
    bias, a, b = event.args[:3]
    dims = _product(state, a, b, event.out)
    state.put(event.out, _add_bias(state, bias, dims, event.out.shape), state.weights_of([bias, a, b]))


@rule("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _grouped_mm(state: State, event: Event) -> None:
    a, b = event.args[:2]
    if a.dim() != 2 or b.dim() != 3:
        raise NotImplementedError
    operands = [(state.tag(a), "tk"), (state.tag(b), "ekn")]
    dims = contract(state, operands, "tn", event.out.shape)
    bias = event.kwargs.get("bias")
    state.put(event.out, _add_bias(state, bias, dims, event.out.shape))


@rule("einsum")
def _einsum(state: State, event: Event) -> None:
    equation, *tensors = event.args
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        tensors = list(tensors[0])
    given, arrow, out = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in equation or any(len(set(term)) != len(term) for term in terms):
        raise NotImplementedError
    operands = [(state.tag(tensor), term) for tensor, term in zip(tensors, terms, strict=True)]
    state.put(event.out, contract(state, operands, out, event.out.shape), state.weights_of(tensors))


@rule("scaled_dot_product_attention")
def _attention(state: State, event: Event) -> None:
    query, key, value = (argument(event, i, n) for i, n in enumerate(("query", "key", "value")))
    mask = argument(event, 3, "attn_mask")
    assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    tags = [state.tag(tensor) for tensor in (query, key, value)]
    for tag in tags[:2]:
        state.stop_dim(tag, -1, "it is the head dim of queries and keys, which attention sums over")
    for tag in tags:
        state.stop_dim(tag, -2, "attention mixes along it")
    operands: list[tuple[list[Factors], list[int]]] = []
    heads = query.shape[-3] if query.dim() > 2 else 1
    for tag, tensor in zip(tags, (query, key, value)):
        dims, shape = [*tag.dims[:-2], (1,), (1,)], [*tensor.shape[:-2], 1, 1]
        if tensor.dim() > 2 and 1 < tensor.shape[-3] < heads:  # grouped queries: each key head serves several in a row
            dims[-3], shape[-3] = (*dims[-3], heads // tensor.shape[-3]), heads
        operands.append((dims, shape))
    out_shape = [*event.out.shape[:-2], event.out.shape[-2], event.out.shape[-1]]
    if isinstance(mask, torch.Tensor):
        mask_dims = [*state.tag(mask).dims[:-2], (1,), (1,)]
        operands.append((mask_dims, [*mask.shape[:-2], 1, 1]))
    dims = state.broadcast_tags(operands, out_shape)
    state.put(event.out, [*dims[:-2], tags[0].dims[-2], tags[2].dims[-1]])


_MHA = """
query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p
out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight q_proj_weight
k_proj_weight v_proj_weight
"""
"""The positional arguments of ``F.multi_head_attention_forward``."""


@rule("multi_head_attention_forward")
def _multi_head_attention(state: State, event: Event) -> None:
    given = dict(zip(_MHA.split(), event.args)) | event.kwargs
    keys = [given.get(name) for name in ("bias_k", "bias_v", "static_k", "static_v")]
    if any(key is not None for key in keys) or given["add_zero_attn"] or given["out_proj_weight"].dim() != 2:
        raise NotImplementedError
    width, heads = given["embed_dim_to_check"], given["num_heads"]
    parts = [
        _projection(state, given, index, width)
        for index in range(3)  # query, key, value: each is (features,) of the projected tensor
    ]
    split = [regroup([part], (heads, width // heads)) for part in parts]
    shared = unify(split[0][0], split[1][0])
    shared = unify(shared, split[2][0])
    for part in split[:2]:
        stop(part[1], "it is the head dim of queries and keys, which attention sums over")
    out, *others = results(event)
    weight = state.tag(given["out_proj_weight"])
    joined: Factors = (*shared, *split[2][1])
    state.contract_weight(joined, weight.dims[1], weight.dims[0], weight.weights)
    query = state.tag(given["query"])
    dims = [*query.dims[:-1], weight.dims[0]]
    state.put(out, _add_bias(state, given["out_proj_bias"], dims, out.shape))
    for tensor in others:
        state.put(tensor, [(int(size),) for size in tensor.shape])
        state.stop_on_use(tensor, shared, "the attention weights are averaged over it")


def _projection(state: State, given: dict[str, Any], index: int, width: int) -> Factors:
    """Returns the output features of the query, key or value projection, after noting it as a linear layer."""
    name = ("query", "key", "value")[index]
    if given.get("use_separate_proj_weight"):
        weight = state.tag(given[f"{name[0]}_proj_weight"])
        features, into = weight.dims
    else:
        weight = state.tag(given["in_proj_weight"])
        features, into = cut(weight.dims[0], index * width, width), weight.dims[1]
    x = state.tag(given[name])
    state.contract_weight(x.dims[-1], into, features, weight.weights)
    if not state.uses[-1].is_row:
        state.pin_dim(x, -1, f"it is the input of {', '.join(sorted(weight.weights))}")
    if given["in_proj_bias"] is not None:
        features = unify(features, cut(state.tag(given["in_proj_bias"]).dims[0], index * width, width))
    return features


@rule("embedding")
def _embedding(state: State, event: Event) -> None:
    ids, weight = argument(event, 0, "input"), argument(event, 1, "weight")
    assert isinstance(ids, torch.Tensor) and isinstance(weight, torch.Tensor)
    tag = state.tag(weight)
    state.lookups.append(Lookup(tag.weights, event.on_batch))
    state.put(event.out, [*((int(size),) for size in ids.shape), tag.dims[1]])


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(state: State, event: Event) -> None:
    x, weight, bias = argument(event, 0, "input"), argument(event, 1, "weight"), argument(event, 2, "bias")
    assert isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    out = event.out
    channel = out.dim() - (weight.dim() - 2) - 1
    depthwise = weight.shape[1] == 1 and weight.shape[0] == x.shape[channel] and "transpose" not in event.name
    tag, kernel = state.tag(x), state.tag(weight)
    if depthwise:
        features = unify(tag.dims[channel], kernel.dims[0])
    else:
        state.pin_dim(tag, channel, "it is the input of a convolution")
        dim = 1 if "transpose" in event.name else 0
        features = pinned(kernel.dims[dim] if _size(kernel.dims[dim]) == out.shape[channel] else (out.shape[channel],),
                          "it is the output of a convolution")  # fmt: skip
    if isinstance(bias, torch.Tensor):
        features = unify(features, state.tag(bias).dims[0])
    for tensor in tensors_in((x,)):
        for dim in range(channel + 1, tensor.dim()):
            state.stop_dim(state.tag(tensor), dim, "a convolution mixes along it")
    state.put(out, [*tag.dims[:channel], features, *((int(size),) for size in out.shape[channel + 1 :])])
