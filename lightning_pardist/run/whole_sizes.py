"""Answers calls that speak of whole sizes with this rank's; see [Note: whole sizes] in describe/roles_calls.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.nested import map_arguments, tensors_in
from lightning_pardist.specs.tensor_plan import RegionShare
from lightning_pardist.specs.tensor_roles import MetTensor, ShardCall, ShardedDim

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
CONVOLUTIONS = frozenset(["conv1d", "conv2d", "conv3d"])


class WholeSizes:
    """What a rank of the tensor axis makes of such calls."""

    def __init__(self, shares: Sequence[RegionShare | None], rank: int, opened: Callable[[Tensor], Tensor]) -> None:
        """Knows the rank.

        Args:
            shares: by region.
            rank: on the tensor axis.
            opened: makes a whole tensor ready for use on shares.
        """
        self._shares = shares
        self._rank = rank
        self._opened = opened

    def run(self, call: ShardCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the call gives on this rank's share."""
        if call.function in ("size", "shape"):
            return self._comparable(call, func(*args, **kwargs))
        if call.met:
            args, kwargs = self._meet(call.met, args, kwargs)
        if call.sizes:
            args, kwargs = self._sized(call, args, kwargs)
        elif call.split:
            return self._split(call, func, args, kwargs)
        elif call.slices:
            args, kwargs = self._sliced(call, args, kwargs)
        elif call.times is not None:
            args, kwargs = self._repeated(call.times, args, kwargs)
        if call.is_random and _draws(call.function, args, kwargs):
            with numbers_of_rank(self._rank, args[0].device):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _share(self, dim: ShardedDim) -> RegionShare:
        share = self._shares[dim.region]
        assert share is not None
        return share

    def _local(self, dim: ShardedDim, whole: int) -> int:
        """Returns this rank's part of a whole size, which is a multiple of the dim's period."""
        return whole // dim.period * self._share(dim).local_size(dim, self._rank)

    # ---- sizes of the result ---------------------------------------------------------------------------------------

    def _sized(self, call: ShardCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x, skipped = args[0], 1
        offset = 0
        if call.function == "unflatten":
            offset, skipped = args[1] % x.dim(), 2
        if len(args) > skipped:
            key, given = None, args[skipped:]
        else:
            key = next(name for name in ("shape", "size", "sizes") if name in kwargs)
            given = (kwargs[key],)
        is_list = len(given) == 1 and isinstance(given[0], (tuple, list))
        sizes = list(given[0] if is_list else given)
        halved = self._with_own_inner(call, x, sizes, offset)
        if halved is not None:
            sizes = halved
        elif not self._asks_for_whole(call, x, sizes, offset):
            return args, kwargs
        else:
            self._make_local(call, x, sizes, offset)
        if call.function in ("view", "reshape"):
            self._mend_mixed(call, x, sizes)
        if key is not None:
            return args, {**kwargs, key: tuple(sizes)}
        return (*args[:skipped], tuple(sizes)), kwargs

    def _make_local(self, call: ShardCall, x: Tensor, sizes: list[int], offset: int) -> None:
        for dim in call.sizes:
            index = dim.dim - offset
            if 0 <= index < len(sizes) and sizes[index] != -1 and sizes[index] % dim.period == 0:
                sizes[index] = self._size(call, x, dim, sizes[index], len(sizes))

    def _with_own_inner(self, call: ShardCall, x: Tensor, sizes: Sequence[int], offset: int) -> list[int] | None:
        """Returns what was meant where the width inside of units was worked out from this rank's width.

        ``x.view(B, T, self.n_head, x.size(-1) // self.n_head)`` asks for all heads, each of a part of its width.
        """
        if all(sizes[dim - offset] == size for dim, size in call.inner if 0 <= dim - offset < len(sizes)):
            return None
        meant = list(sizes)
        for dim, size in call.inner:
            if 0 <= dim - offset < len(meant):
                meant[dim - offset] = size
        self._make_local(call, x, meant, offset)
        there = x.shape[offset] if call.function == "unflatten" else x.numel()
        asked = math.prod(meant)
        fits = asked == there if asked > 0 else meant.count(-1) == 1 and there % -asked == 0
        return meant if fits else None

    def _mend_mixed(self, call: ShardCall, x: Tensor, sizes: list[int]) -> None:
        """Replaces a size that is neither whole nor local: this rank's key-value heads times all their query heads."""
        for dim in call.sizes:
            if -1 in sizes or math.prod(sizes) == x.numel() or sizes[dim.dim] == 0:
                return
            local = self._share(dim).local_size(dim, self._rank)
            if math.prod(sizes) // sizes[dim.dim] * local == x.numel():
                sizes[dim.dim] = local

    def _size(self, call: ShardCall, x: Tensor, dim: ShardedDim, whole: int, ndim: int) -> int:
        local = self._local(dim, whole)
        if call.function in ("expand", "broadcast_to"):
            index = dim.dim - ndim + x.dim()
            if index >= 0 and x.shape[index] == whole != local:  # it was local already
                return whole
        return local

    def _asks_for_whole(self, call: ShardCall, x: Tensor, sizes: Sequence[int], offset: int) -> bool:
        """Returns False for sizes that were taken from local tensors: they hold as many elements as there are."""
        if call.function in ("expand", "broadcast_to") or call.function.startswith("new_") or -1 in sizes:
            return True
        there = x.shape[offset] if call.function == "unflatten" else x.numel()
        return math.prod(sizes) != there

    def _comparable(self, call: ShardCall, sizes: Any) -> Any:
        if not isinstance(sizes, torch.Size):
            return sizes
        shared = {dim.dim: (dim.period, self._local(dim, dim.period)) for dim in call.sizes}
        return ShareSizes(sizes, shared)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _split(self, call: ShardCall, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim = args[0], call.split_dim
        assert dim is not None
        lengths = [self._share(piece).local_size(piece, self._rank) for piece in call.split]
        given = args[1] if len(args) > 1 else next(iter(v for k, v in kwargs.items() if k != "dim"), None)
        was_local = isinstance(given, (tuple, list)) and sum(given) == x.shape[dim] and call.function != "tensor_split"
        if was_local or sum(lengths) == 0 or x.shape[dim] % sum(lengths):
            return func(*args, **kwargs)
        scale = x.shape[dim] // sum(lengths)
        return torch.split(x, [length * scale for length in lengths], dim)

    def _sliced(self, call: ShardCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        bounds = {}
        for piece in call.slices:
            share = self._share(piece.before)
            start = share.local_size(piece.before, self._rank)
            bounds[piece.dim] = start, share.local_size(piece.taken, self._rank)
        if call.function == "narrow":
            ((start, length),) = bounds.values()
            return (args[0], call.slices[0].dim, start, length), {}
        x, index = args
        entries = list(index) if isinstance(index, tuple) else [index]
        takes = [0 if entry is None or entry is Ellipsis else 1 for entry in entries]
        dim = 0
        for position, (entry, taken) in enumerate(zip(entries, takes)):
            if entry is Ellipsis:
                dim += x.dim() - sum(takes)
            elif isinstance(entry, slice) and dim in bounds:
                start, length = bounds[dim]
                entries[position] = slice(start, start + length)
            dim += taken
        return (x, tuple(entries)), kwargs

    def _repeated(self, times: ShardedDim, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        local = self._local(times, times.period)
        if len(args) > 1:
            return (args[0], local, *args[2:]), kwargs
        return args, {**kwargs, "repeats": local}

    # ---- whole tensors that meet shares ------------------------------------------------------------------------------

    def _meet(self, met: Sequence[MetTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        by_position = {tensor.position: tensor for tensor in met}
        others = [tensor for i, tensor in enumerate(tensors_in((args, kwargs))) if i not in by_position]
        counter = iter(range(1 << 30))

        def changed(item: Any) -> Any:
            found = by_position.get(next(counter)) if isinstance(item, Tensor) else None
            return item if found is None else self._cut(found, item, others)

        new_args = tuple(map_arguments(changed, item) for item in args)
        return new_args, {key: map_arguments(changed, item) for key, item in kwargs.items()}

    def _cut(self, met: MetTensor, tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
        if met.needs_gradient:
            tensor = self._opened(tensor)
        for dim in met.dims:
            whole = tensor.shape[dim.dim]
            if whole % dim.period:
                continue
            local = self._local(dim, whole)
            sizes = {other.shape[dim.dim] for other in others if other.dim() >= -dim.dim}
            if local in sizes and whole not in sizes:
                tensor = tensor.index_select(dim.dim, self._indices(dim, whole, tensor.device))
        return tensor

    def _indices(self, dim: ShardedDim, whole: int, device: torch.device) -> Tensor:
        return held_indices(dim, self._share(dim), self._rank, whole).to(device)


def own_groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments of a convolution with as many groups as its weight has of these channels.

    A depthwise convolution inside a region has a share of the channels, and code that gives the number of all.
    """
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args)) | kwargs
    x, weight = given["input"], given["weight"]
    channels = x.shape[x.dim() - weight.dim() + 1]
    if channels == weight.shape[1] * given.get("groups", 1):
        return args, kwargs
    return (), {**given, "groups": channels // weight.shape[1]}


class ShareSizes(tuple[int, ...]):
    """Sizes of a share that equal, in comparisons, those of the whole too.

    ``torch.Size`` cannot be subclassed, so these are given only where the described step compared the sizes.
    """

    _shared: Mapping[int, tuple[int, int]]

    def __new__(cls, sizes: Sequence[int], shared: Mapping[int, tuple[int, int]]) -> ShareSizes:
        """Makes them.

        Args:
            sizes: of the share.
            shared: by dim, so many of the whole for so many of this rank.
        """
        made = super().__new__(cls, sizes)
        made._shared = shared
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(other) != len(self):
            return False
        return all(self._is_same(dim, own, given) for dim, (own, given) in enumerate(zip(self, other, strict=True)))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def _is_same(self, dim: int, own: int, given: Any) -> bool:
        whole, local = self._shared.get(dim, (1, 1))
        is_whole: bool = given % whole == 0 and given // whole * local == own
        return is_whole or bool(own == given)

    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self)


def held_indices(dim: ShardedDim, share: RegionShare, rank: int, whole: int) -> Tensor:
    """Returns which indices of a whole dim a rank holds."""
    parts = [
        torch.arange(start + i * dim.period, start + i * dim.period + length)
        for i in range(whole // dim.period)
        for start, length in share.stretches(dim.terms, rank)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


@contextmanager
def numbers_of_rank(rank: int, device: torch.device) -> Iterator[None]:
    """Draws random numbers that differ between ranks, and leaves the generators as they are on all of them.

    Ranks of the tensor axis share one generator state. A number drawn from it seeds each rank's own numbers, so a run
    can be repeated, resumed and recomputed from the usual states alone.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu")) + rank
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def _draws(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call draws any random numbers at all."""
    if function == "scaled_dot_product_attention":
        return float(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
    if "dropout" in function:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", True)
        return bool(training) and p > 0
    return True
