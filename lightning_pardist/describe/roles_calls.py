"""Which calls inside a region speak of whole sizes, so that a rank can run the module's own code on its share.

[Note: whole sizes] Inside a region every tensor is a plain local one. Code that takes sizes from its tensors, writes -1
or counts in head dims runs on it as it is. Code that knows how many heads there are (``view(B, T, self.n_head, ...)``,
``split(self.width)``, ``qkv[..., :width]``, an ALiBi bias of all heads) asks for the whole. The trace knows, call by
call, which dims of the result the region shares out, so these calls can be answered in local sizes. Calls are found
again by the module whose forward makes them, the function, and the how-manieth it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from lightning_pardist.base.function_names import CONTRACTIONS
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_axes import Axis, Factors, expand, size_of
from lightning_pardist.describe.roles_sharing import Sharing, Terms
from lightning_pardist.describe.roles_state import State, argument, results
from lightning_pardist.describe.roles_trace import Call, Event, Trace
from lightning_pardist.specs.tensor_roles import MetTensor, ShardCall, ShardedDim, SlicedDim

_SIZED = frozenset("view reshape unflatten expand broadcast_to new_empty new_zeros new_ones".split())
_SPLIT = frozenset(["split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"])
_RANDOM = frozenset(
    """
    dropout dropout1d dropout2d alpha_dropout feature_dropout feature_alpha_dropout bernoulli rrelu
    scaled_dot_product_attention rand_like randn_like
    """.split()
)
_LINEAR = CONTRACTIONS | {"multi_head_attention_forward"}
_LOOK = frozenset(["embedding"])


def shard_calls(trace: Trace, sharing: Sharing, state: State) -> Iterator[ShardCall]:
    """Yields the calls that must be answered in local sizes, once per module."""
    counts: dict[tuple[int, str], int] = {}
    first_entry: dict[str, int] = {}
    for call in trace.calls:
        key = call.entry, call.name
        ordinal = counts.get(key, 0)
        counts[key] = ordinal + 1
        module = call.modules[-1] if call.modules else ""
        is_asked = call.event is not None or call.compared is not None
        if not is_asked or first_entry.setdefault(module, call.entry) != call.entry:
            continue
        if call.event is not None:
            found = _needs(trace.events[call.event], sharing, state)
        else:
            found = _compared(call, sharing)
        if found is not None:
            yield replace(found, module=module, function=call.name, ordinal=ordinal)


def _compared(call: Call, sharing: Sharing) -> ShardCall | None:
    assert call.compared is not None
    dims = tuple(sharing.dims(call.compared))
    return ShardCall(module="", function=call.name, ordinal=0, sizes=dims) if dims else None


def _needs(event: Event, sharing: Sharing, state: State) -> ShardCall | None:
    outs = [out for out in results(event) if sharing.is_shared(out)]
    inputs = list(tensors_in((event.args, event.kwargs)))
    if not outs and not any(sharing.is_shared(tensor) for tensor in inputs):
        return None
    blank = ShardCall(module="", function=event.name, ordinal=0)
    call = blank
    if event.name in _SIZED and outs:
        sizes = tuple(sharing.dims(outs[0])) + _repeated(event, sharing, state)
        is_view = event.name in ("view", "reshape", "unflatten")
        call = replace(call, sizes=sizes, inner=_inner_sizes(event.args[0], outs[0], sizes) if is_view else ())
    elif event.name in _SPLIT:
        call = _split(call, event, sharing, state)
    elif event.name in ("getitem", "narrow"):
        call = replace(call, slices=tuple(_slices(event, sharing, state)))
    elif event.name == "repeat_interleave":
        call = _times(call, event, sharing, state)
    is_layer = event.name in _LINEAR and any(state.tag(tensor).weights for tensor in inputs)
    if not is_layer and event.name not in _LOOK:
        call = replace(call, met=tuple(_met(event, inputs, sharing, state)))
    if event.name in _RANDOM and outs:
        call = replace(call, is_random=True)
    return call if call != blank else None


def _inner_sizes(x: torch.Tensor, out: torch.Tensor, shared: Sequence[ShardedDim]) -> tuple[tuple[int, int], ...]:
    """Returns the (dim, size) that a view splits a shared dim into inside of its units, such as the width of a head.

    Code may work them out from a rank's own tensor (``x.size(-1) // self.n_head``), and gets them wrong then.
    """
    if x.numel() != out.numel() or out.numel() == 0:
        return ()
    found: list[tuple[int, int]] = []
    start = 0
    for size in x.shape:
        end, product = start, 1
        while end < out.dim() and (product < size or (size == 1 and end == start and out.shape[end] == 1)):
            product *= int(out.shape[end])
            end += 1
        if product != size:
            return ()
        outer = [dim.dim for dim in shared if start <= dim.dim < end]
        found += [(dim, int(out.shape[dim])) for dim in range(outer[0] + 1, end) if dim not in outer] if outer else []
        start = end
    return tuple(found)


def _repeated(event: Event, sharing: Sharing, state: State) -> tuple[ShardedDim, ...]:
    """Returns the new dim of an expand that repeats key-value heads for their query heads."""
    if event.name not in ("expand", "broadcast_to"):
        return ()
    dims, out = state.tag(event.args[0]).dims, event.out
    ahead = out.dim() - len(dims)
    for index in range(1, out.dim()):
        before = sharing.dim(dims[index - 1 - ahead]) if index - 1 >= ahead else None
        if before is None or _counts_queries(before) or size_of(dims[index - ahead]) != 1:
            continue
        found = sharing.dim((*dims[index - 1 - ahead], int(out.shape[index])))
        if found is not None and _counts_queries(found):
            terms: Terms = ((int(out.shape[index]), "times"),)
            return (ShardedDim(dim=index, region=before.region, terms=terms),)
    return ()


def _counts_queries(dim: ShardedDim) -> bool:
    """Returns whether a dim has the query heads in it already, not the key-value heads alone."""
    return dim.terms[-1][1] == "sub"


def _times(call: ShardCall, event: Event, sharing: Sharing, state: State) -> ShardCall:
    times, dim = argument(event, 1, "repeats"), argument(event, 2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int):
        return call
    dims = state.tag(event.args[0]).dims[dim]
    before, found = sharing.dim(dims), sharing.dim((*dims, times))
    if before is None or _counts_queries(before) or found is None or not _counts_queries(found):
        return call
    return replace(call, times=ShardedDim(dim=dim, region=found.region, terms=((times, "times"),)))


def _split(call: ShardCall, event: Event, sharing: Sharing, state: State) -> ShardCall:
    dim = argument(event, 2, "dim", default=0)
    assert isinstance(dim, int)
    outs = list(results(event))
    dim %= outs[0].dim()
    pieces = [sharing.dim(state.tag(out).dims[dim], dim) for out in outs]
    region = next((piece.region for piece in pieces if piece is not None), None)
    if region is None:
        return call
    whole = [ShardedDim(dim=dim, region=region, terms=((int(out.shape[dim]), "whole"),)) for out in outs]
    return replace(call, split_dim=dim, split=tuple(piece or plain for piece, plain in zip(pieces, whole)))


def _slices(event: Event, sharing: Sharing, state: State) -> Iterator[SlicedDim]:
    x = event.args[0]
    tag = state.tag(x)
    for dim, start, length in _cuts_of(event, x):
        found = sharing.dim(tag.dims[dim], dim)
        if found is None or length == x.shape[dim]:
            continue
        taken = sharing.dim(_part(tag.dims[dim], start, length), dim)
        before = sharing.before(tag.dims[dim], start)
        yield SlicedDim(
            dim=dim,
            start=start,
            length=length,
            before=ShardedDim(dim=dim, region=found.region, terms=before),
            taken=taken or ShardedDim(dim=dim, region=found.region, terms=((length, "whole"),)),
        )


def _part(factors: Factors, start: int, length: int) -> Factors:
    parts = expand(factors)
    first, rest = parts[0], parts[1:]
    inner = size_of(rest)
    if isinstance(first, Axis) and (start // inner, length // inner) in first.cuts:
        return (first.cuts[start // inner, length // inner], *rest)
    return (length,)


def _cuts_of(event: Event, x: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields (dim, start, length) of what a slice takes."""
    if event.name == "narrow":
        dim, start, length = (argument(event, i, n) for i, n in ((1, "dim"), (2, "start"), (3, "length")))
        if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
            yield dim % x.dim(), start % x.shape[dim], length
        return
    index = event.args[1]
    entries = list(index) if isinstance(index, tuple) else [index]
    takes = [0 if entry is None or entry is Ellipsis else 1 for entry in entries]
    dim = 0
    for entry, takes_dim in zip(entries, takes):
        if entry is Ellipsis:
            dim += x.dim() - sum(takes)
        elif isinstance(entry, slice):
            start, end, step = entry.indices(x.shape[dim])
            if step == 1:
                yield dim, start, max(end - start, 0)
        dim += takes_dim


def _met(event: Event, inputs: Sequence[torch.Tensor], sharing: Sharing, state: State) -> Iterator[MetTensor]:
    """Yields the whole tensors that a result in shares is made of: its operands, a mask or bias of attention."""
    if not any(sharing.is_shared(tensor) for tensor in inputs):
        return
    outs = [out for out in results(event) if sharing.is_shared(out)]
    if not outs:
        return
    out = outs[0]
    shared = {dim.dim - out.dim(): dim for dim in sharing.dims(out)}
    for position, tensor in enumerate(inputs):
        if sharing.is_shared(tensor):
            continue
        dims = tuple(
            replace(shared[from_right], dim=from_right)
            for from_right in shared
            if -from_right <= tensor.dim()
            and tensor.shape[from_right] == out.shape[from_right] != 1
            and _is_aligned(event, position, from_right, inputs)
        )
        needs_gradient = tensor.requires_grad and not state.tag(tensor).weights
        if dims or needs_gradient:
            yield MetTensor(position=position, dims=dims, needs_gradient=needs_gradient)


def _is_aligned(event: Event, position: int, from_right: int, inputs: Sequence[torch.Tensor]) -> bool:
    """Returns whether a dim of an argument is the result's dim in the same place; a product sums over one of each."""
    if event.name not in _LINEAR:
        return True
    if event.name not in ("matmul", "bmm") or any(tensor.dim() < 2 for tensor in inputs):
        return False
    return from_right != (-1, -2)[position]


def quiet_modules(trace: Trace, calls: Iterable[ShardCall]) -> tuple[str, ...]:
    """Returns modules inside those of ``calls`` whose own calls of the same functions must not be counted with them."""
    counted: dict[str, set[str]] = {}
    for call in calls:
        counted.setdefault(call.module, set()).add(call.function)
    found: dict[str, None] = {}
    for made in trace.calls:
        if not made.modules or made.modules[-1] in counted:
            continue
        around = next((name for name in reversed(made.modules[:-1]) if name in counted), None)
        if around is not None and made.name in counted[around]:
            found[made.modules[-1]] = None
    return tuple(found)
