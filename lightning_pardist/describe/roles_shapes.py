"""Rules for what moves, views, slices or joins dims, and for elementwise functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_axes import Axis, Factors, cut, regroup, stop, unify
from lightning_pardist.describe.roles_state import State, argument, pinned, results, rule
from lightning_pardist.describe.roles_trace import Event


@rule(
    """
    abs absolute add addcdiv addcmul alias_copy alpha_dropout bernoulli bfloat16 celu clamp clamp_max clamp_min
    clip clone contiguous copy copysign cos cosh cpu cuda data detach div divide double dropout dropout1d
    dropout2d elu eq erf erfc exp exp2 expm1 feature_alpha_dropout feature_dropout fill float float_power floor
    fmod ge gelu gt half hardshrink hardsigmoid hardswish hardtanh imag isclose isfinite isinf isnan ldexp le
    leaky_relu lerp log log10 log1p log2 logical_and logical_not logical_or logsigmoid lt mask_fill masked_fill
    maximum minimum mish mul multiply nan_to_num ne neg negative polar pos positive pow prelu real reciprocal
    relu relu6 remainder requires_grad retain_grad round rrelu rsqrt rsub selu sigmoid sign silu sin sinh
    softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to true_divide type
    type_as where xlogy zero
    """
)
def elementwise(state: State, event: Event) -> None:
    """Operands agree dim by dim."""
    tensors = list(tensors_in((event.args, event.kwargs)))
    weights = state.weights_of(tensors)
    for out in results(event):
        state.put(out, state.broadcast(tensors, out.shape), weights)


@rule("empty_like zeros_like ones_like full_like rand_like randn_like new_full new_tensor")
def _fresh(state: State, event: Event) -> None:
    for out in results(event):
        state.put(out, [(int(size),) for size in out.shape])


@rule("new_empty new_zeros new_ones")
def _room(state: State, event: Event) -> None:
    """Axes of its own: what is copied into a slice of it is then shared out with it."""
    state.put(event.out, [(Axis(int(size)),) for size in event.out.shape])


#  views


@rule("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze", "ravel")
def _view(state: State, event: Event) -> None:
    x = event.args[0]
    tag = state.tag(x)
    if x.numel() != event.out.numel():  # a view as another dtype
        raise NotImplementedError
    state.put(event.out, regroup(tag.dims, event.out.shape), tag.weights)


@rule("permute", "transpose", "swapaxes", "swapdims", "t", "T", "mT", "movedim", "adjoint")
def _permute(state: State, event: Event) -> None:
    x = event.args[0]
    tag = state.tag(x)
    state.put(event.out, [tag.dims[dim] for dim in _order(event, x.dim())], tag.weights)


def _order(event: Event, ndim: int) -> list[int]:
    order = list(range(ndim))
    if event.name in ("t", "T"):
        return order[::-1]
    if event.name in ("mT", "adjoint"):
        return [*order[:-2], order[-1], order[-2]]
    if event.name == "permute":
        dims = argument(event, 1, "dims")
        given = event.args[1:] if isinstance(dims, int) else dims
        assert isinstance(given, Sequence)
        return [dim % ndim for dim in given]
    one, other = argument(event, 1, "dim0", "axis0", "source"), argument(event, 2, "dim1", "axis1", "destination")
    if event.name == "movedim":
        if not isinstance(one, int) or not isinstance(other, int):
            raise NotImplementedError
        order.insert(other % ndim, order.pop(one % ndim))
        return order
    assert isinstance(one, int) and isinstance(other, int)
    order[one], order[other] = order[other], order[one]
    return order


@rule("expand", "expand_as", "broadcast_to")
def _expand(state: State, event: Event) -> None:
    tag = state.tag(event.args[0])
    state.put(event.out, state.broadcast([event.args[0]], event.out.shape), tag.weights)


@rule("repeat", "tile")
def _repeat(state: State, event: Event) -> None:
    x, out = event.args[0], event.out
    dims: list[Factors] = [(), ] * (out.dim() - x.dim()) + state.tag(x).dims  # fmt: skip
    sizes = [1] * (out.dim() - x.dim()) + list(x.shape)
    state.put(out, [(new // old, *dim) for dim, old, new in zip(dims, sizes, out.shape, strict=True)])


@rule("repeat_interleave")
def _repeat_interleave(state: State, event: Event) -> None:
    x, times, dim = event.args[0], argument(event, 1, "repeats"), argument(event, 2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        raise NotImplementedError
    dims = list(state.tag(x).dims)
    dims[dim] = (*dims[dim], times)
    state.put(event.out, dims)


@rule("view_as_complex", "view_as_real")
def _complex(state: State, event: Event) -> None:
    tag = state.tag(event.args[0])
    if event.name == "view_as_real":
        state.put(event.out, [*tag.dims, (2,)])
    else:
        state.stop_dim(tag, -1, "it holds real and imaginary parts")
        state.put(event.out, tag.dims[:-1])


#  slices


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split")
def _split(state: State, event: Event) -> None:
    dim = argument(event, 2, "dim", default=0)
    assert isinstance(dim, int)
    tag, start = state.tag(event.args[0]), 0
    for out in results(event):
        dims = list(tag.dims)
        dims[dim] = cut(dims[dim], start, out.shape[dim])
        start += out.shape[dim]
        state.put(out, dims, tag.weights)


@rule("unbind", "iter")
def _unbind(state: State, event: Event) -> None:
    dim = argument(event, 1, "dim", default=0)
    assert isinstance(dim, int)
    tag = state.tag(event.args[0])
    for index, out in enumerate(results(event)):
        cut(tag.dims[dim], index, 1)
        state.put(out, without(tag.dims, [dim]), tag.weights)


@rule("select", "narrow")
def _select(state: State, event: Event) -> None:
    x, dim, start = event.args[0], argument(event, 1, "dim"), argument(event, 2, "index", "start")
    if not isinstance(dim, int) or not isinstance(start, int):
        raise NotImplementedError
    tag = state.tag(x)
    length = 1 if event.name == "select" else event.out.shape[dim]
    part = cut(tag.dims[dim], start % x.shape[dim], length)
    dims = list(tag.dims)
    dims[dim] = part
    state.put(event.out, without(dims, [dim]) if event.name == "select" else dims, tag.weights)


@rule("getitem")
def _getitem(state: State, event: Event) -> None:
    x, index = event.args
    tag = state.tag(x)
    entries = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(_consumes(entry) for entry in entries)
    if Ellipsis in [entry if entry is Ellipsis else None for entry in entries]:
        place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        entries[place : place + 1] = [slice(None)] * (x.dim() - consumed)
    else:
        entries += [slice(None)] * (x.dim() - consumed)
    if sum(isinstance(entry, (torch.Tensor, list)) for entry in entries) > 1:
        raise NotImplementedError
    dims: list[Factors] = []
    left = list(zip(tag.dims, x.shape))
    for entry in entries:
        taken = [left.pop(0) for _ in range(_consumes(entry))]
        dims += _indexed(entry, taken, event.out.shape[len(dims) :])
    state.put(event.out, dims, tag.weights)


def _consumes(entry: Any) -> int:
    """Returns how many dims an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype == torch.bool else 1


def _indexed(entry: Any, taken: Sequence[tuple[Factors, int]], shape: Sequence[int]) -> list[Factors]:
    """Returns the dims of the result that come from one entry of an index."""
    if entry is None:
        return [(1,)]
    if isinstance(entry, bool):
        raise NotImplementedError
    if isinstance(entry, slice):
        return [_sliced(taken[0][0], taken[0][1], entry)]
    if isinstance(entry, int):
        cut(taken[0][0], entry % taken[0][1], 1)
        return []
    for dim, _ in taken:
        stop(dim, "it is indexed by a tensor")
    if isinstance(entry, list):
        return [(len(entry),)]
    assert isinstance(entry, torch.Tensor)
    count = 1 if entry.dtype == torch.bool else entry.dim()
    return [(int(size),) for size in shape[:count]]


def _sliced(dim: Factors, size: int, given: slice) -> Factors:
    start, end, step = given.indices(size)
    if step == 1:
        return cut(dim, start, max(end - start, 0))
    if start < step and end == size and size % step == 0:  # every step-th: the inner factor of the dim
        outer, inner = regroup([dim], (size // step, step))
        cut(inner, start, 1)
        return outer
    stop(dim, "a slice with a step takes elements of it")
    return (len(range(start, end, step)),)


def without(dims: Sequence[Factors], gone: Iterable[int]) -> list[Factors]:
    """Returns the dims that are left."""
    left_out = {dim % len(dims) for dim in gone}
    return [dim for index, dim in enumerate(dims) if index not in left_out]


@rule("glu")
def _glu(state: State, event: Event) -> None:
    x, dim = event.args[0], argument(event, 1, "dim", default=-1)
    assert isinstance(dim, int)
    dims, half = list(state.tag(x).dims), x.shape[dim] // 2
    dims[dim] = unify(cut(dims[dim], 0, half), cut(dims[dim], half, half))
    state.put(event.out, dims)


@rule("cat", "concat", "concatenate", "stack")
def _cat(state: State, event: Event) -> None:
    tensors, dim = event.args[0] if event.args else event.kwargs["tensors"], argument(event, 1, "dim", default=0)
    assert isinstance(dim, int)
    dim %= event.out.dim()
    is_stack = event.name == "stack"
    tensors = [tensor for tensor in tensors if is_stack or tensor.numel()]  # a cache is empty at first
    operands: list[tuple[list[Factors], list[int]]] = []
    joined: list[Factors] = []
    for tensor in tensors:
        dims, shape = list(state.tag(tensor).dims), list(tensor.shape)
        if not is_stack:
            joined.append(dims.pop(dim))
            shape.pop(dim)
        operands.append((dims, shape))
    merged = state.broadcast_tags(operands, [size for index, size in enumerate(event.out.shape) if index != dim])
    for part in joined:
        stop(part, "it is concatenated with something else along this dim")
    # The new dim meets what it meets: if any part of it came from a parameter, that may not be sharded either.
    new: Factors = (event.out.shape[dim],)
    if any(not isinstance(factor, int) for part in joined for factor in part):
        new = pinned(new, "it is a concatenation")
    state.put(event.out, [*merged[:dim], new, *merged[dim:]], state.weights_of(tensors))
