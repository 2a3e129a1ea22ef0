"""Rules for what mixes values along a dim: softmax, sums, norms, losses, and what nobody saw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_axes import Factors, stop
from lightning_pardist.describe.roles_shapes import elementwise, without
from lightning_pardist.describe.roles_state import State, argument, results, rule
from lightning_pardist.describe.roles_trace import UNSEEN, Event


@rule(
    "softmax log_softmax softmin cumsum cumprod cummax logcumsumexp flip roll sort topk argsort kthvalue normalize",
    "index_select gather take_along_dim",
)
def _along(state: State, event: Event) -> None:
    position = 2 if event.name in ("roll", "topk", "normalize", "take_along_dim", "kthvalue") else 1
    default = {"normalize": 1, "sort": -1, "topk": -1, "argsort": -1, "kthvalue": -1}.get(event.name)
    dim = argument(event, position, "dim", "dims", default=default)
    x = event.args[0] if event.args else event.kwargs["input"]
    tag = state.tag(x)
    if event.name == "flip" and isinstance(dim, int):
        dim = event.args[1:] or dim
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    assert isinstance(dims, Iterable)
    gone = {index % x.dim() for index in dims}
    for index in gone:
        state.stop_dim(tag, index, f"{event.name} mixes along it")
    for out in results(event):
        new: list[Factors] = []
        for index in range(x.dim()):
            same = out.shape[index] == x.shape[index]
            if not same:
                state.stop_dim(tag, index, f"{event.name} takes elements of it")
            new.append(tag.dims[index] if same else (int(out.shape[index]),))
        state.put(out, new)


@rule(
    """
    sum mean var std var_mean std_mean max min amax amin norm logsumexp argmax argmin any all prod nansum
    nanmean median vector_norm linalg_vector_norm aminmax count_nonzero
    """
)
def _reduce(state: State, event: Event) -> None:
    x = event.args[0] if event.args else event.kwargs["input"]
    after_order = event.name in ("norm", "vector_norm", "linalg_vector_norm")
    dim: Any = argument(event, 2 if after_order else 1, "dim", "axis")
    if isinstance(dim, torch.Tensor):
        return elementwise(state, event)  # the larger of two tensors
    tag = state.tag(x)
    if dim is None or isinstance(dim, (bool, torch.dtype)) or (isinstance(dim, (tuple, list)) and not dim):
        gone = set(range(x.dim()))
    else:
        gone = {index % x.dim() for index in ([dim] if isinstance(dim, int) else dim)}
    for index in gone:
        state.stop_dim(tag, index, f"{event.name} mixes along it")
    for out in results(event):
        if out.dim() == x.dim():
            state.put(out, [(1,) if index in gone else d for index, d in enumerate(tag.dims)])
        else:
            state.put(out, without(tag.dims, gone))


@rule("layer_norm", "rms_norm")
def normalisation(state: State, event: Event) -> None:
    """Pins the dims that are normalised over."""
    x, shape, weight, bias = (
        argument(event, i, n) for i, n in enumerate(("input", "normalized_shape", "weight", "bias"))
    )
    assert isinstance(x, torch.Tensor) and isinstance(shape, Sequence)
    tag = state.tag(x)
    for dim in range(1, len(shape) + 1):
        state.pin_dim(tag, -dim, f"{event.name} normalises over it")
    affine = [tensor for tensor in (weight, bias) if isinstance(tensor, torch.Tensor)]
    state.put(event.out, state.broadcast([x, *affine], event.out.shape))


@rule("pad")
def _pad(state: State, event: Event) -> None:
    x, pad = event.args[:2]
    tag = state.tag(x)
    dims = list(tag.dims)
    for index in range(len(pad) // 2):
        if pad[2 * index] or pad[2 * index + 1]:
            state.stop_dim(tag, -1 - index, "it is padded")
            dims[-1 - index] = (int(event.out.shape[-1 - index]),)
    state.put(event.out, dims)


@rule("tril", "triu")
def _triangle(state: State, event: Event) -> None:
    tag = state.tag(event.args[0])
    for dim in (-1, -2):
        state.stop_dim(tag, dim, f"{event.name} treats its places differently")
    state.put(event.out, tag.dims)


@rule("cross_entropy", "nll_loss")
def _cross_entropy(state: State, event: Event) -> None:
    x = event.args[0] if event.args else event.kwargs["input"]
    tag = state.tag(x)
    classes = 1 if x.dim() > 1 else 0
    for index, dim in enumerate(tag.dims):
        if index == classes:
            state.score(dim, "a cross entropy is taken over it")
        else:
            stop(dim, "a loss is taken over it")
    for out in results(event):
        state.put(out, [(int(size),) for size in out.shape])


@rule(
    """
    mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div huber_loss
    """
)
def _loss(state: State, event: Event) -> None:
    for tensor in tensors_in(event.args):
        for dim in state.tag(tensor).dims:
            stop(dim, "a loss is taken over it")
    for out in results(event):
        state.put(out, [(int(size),) for size in out.shape])


@rule(UNSEEN)
def _unseen(state: State, event: Event) -> None:
    state.give_up(event, "it goes through " + UNSEEN)
