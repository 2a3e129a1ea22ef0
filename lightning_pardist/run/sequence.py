"""Sequence parallel: what lies between the regions of a block is sharded over the sequence.

[Note: sequence shards] The first block of a stack keeps this rank's positions, the last one gathers them. Between,
norms, dropout and residuals work on positions alone. The module around a region (an attention, an MLP) gets all
positions: its code may ask for lengths, masks or rotary tables of the whole. The layer that ends the region sums and
keeps this rank's positions, in one reduce-scatter instead of an all-reduce. Whatever parameters a block has besides the
sharded ones see a part of the positions only, or a part of the heads: their gradients are summed over the ranks, all in
one collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import without_function_modes
from lightning_pardist.run.tensor_ops import (
    Group,
    close_sequence,
    copy_to_ranks,
    gather_from_ranks,
    open_sequence,
    split_for_ranks,
)
from lightning_pardist.specs.tensor_plan import SequenceStack


@dataclass(frozen=True)
class _Positions:
    """How the positions of the running stack fall on the ranks."""

    dim: int
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole hidden state."""


@dataclass(frozen=True)
class SequenceState:
    """Where in a stack the code is."""

    positions: _Positions | None
    inside: int


class SequenceShards:
    """The running stack of one rank, if any."""

    def __init__(self, rank: int, size: int, group: Group) -> None:
        self._rank = rank
        self._size = size
        self._group = group
        self._now: _Positions | None = None
        self._inside = 0
        self._flat: list[Tensor] = []

    @property
    def is_inside_region(self) -> bool:
        """True in the module around a region, where all positions are there."""
        return self._inside > 0

    def reset(self) -> None:
        """Forgets a stack that an exception has ended."""
        self._now, self._inside = None, 0
        self._flat.clear()

    def state(self) -> SequenceState:
        """Returns where the code is now."""
        return SequenceState(self._now, self._inside)

    @contextmanager
    def as_it_was(self, state: SequenceState) -> Iterator[None]:
        """Lets code run as if it were where it was, as a block that is recomputed in the backward pass must."""
        before = self.state()
        self._now, self._inside = state.positions, state.inside
        try:
            yield
        finally:
            self._now, self._inside = before.positions, before.inside
            self._flat.clear()

    # ---- the stack ---------------------------------------------------------------------------------------------------

    def watch(self, module: nn.Module, stack: SequenceStack, is_running: Callable[[], bool]) -> list[Any]:
        """Installs hooks on the stack's ends and on the modules around its regions; returns their handles.

        Args:
            module: what the stack is in.
            stack: its blocks.
            is_running: False while others stand in for them.
        """
        first, last = module.get_submodule(stack.blocks[0]), module.get_submodule(stack.blocks[-1])

        def enter(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if not is_running():
                return None
            hidden = args[0] if stack.hidden == "0" else kwargs[stack.hidden]
            with without_function_modes():  # what hooks do is none of the module's own calls, which are counted
                shard = self._split(hidden, stack.dim)
            return ((shard, *args[1:]), kwargs) if stack.hidden == "0" else (args, {**kwargs, stack.hidden: shard})

        def leave(_: nn.Module, args: Any, output: Any) -> Any:
            if not is_running():
                return None
            is_tuple = isinstance(output, (tuple, list))
            with without_function_modes():
                whole = self._whole(output[0] if is_tuple else output)
            return type(output)([whole, *output[1:]]) if is_tuple else whole

        handles: list[Any] = [
            first.register_forward_pre_hook(enter, with_kwargs=True, prepend=False),
            # Ahead of others: the hook that ends a pipeline stage takes what it sees.
            last.register_forward_hook(leave, prepend=True),
        ]
        for name in dict.fromkeys(stack.around_regions):
            owner = module.get_submodule(name)
            handles.append(owner.register_forward_pre_hook(self._open, with_kwargs=True))
            handles.append(owner.register_forward_hook(self._shut, always_call=True))
        return handles

    def _split(self, hidden: Tensor, dim: int) -> Tensor:
        length = hidden.shape[dim]
        if length < self._size:
            raise ValueError(
                message(
                    "Sequence parallel needs at least one position for every rank of the tensor axis.",
                    got=f"{length} position(s) for {self._size} ranks",
                    source="the batch",
                    change="use longer sequences, or TensorOptions(sequence_parallel=False)",
                )
            )
        each, left = divmod(length, self._size)
        lengths = tuple(each + (rank < left) for rank in range(self._size))
        self._now = _Positions(dim, lengths, tuple(hidden.shape))
        return split_for_ranks(hidden, dim, lengths, self._group)

    def _whole(self, hidden: Tensor) -> Tensor:
        now, self._now = self._now, None
        assert now is not None
        self._flat.clear()
        return gather_from_ranks(hidden, now.dim, now.lengths, self._group)

    # ---- regions -----------------------------------------------------------------------------------------------------

    def _open(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._inside += 1
        if self._now is None:
            return None
        known: dict[int, Tensor] = {}

        def opened(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return type(item)(opened(part) for part in item) if type(item) in (tuple, list) else item
            if id(item) not in known:
                known[id(item)] = self.opened(item)
            return known[id(item)]

        with without_function_modes():
            return tuple(opened(item) for item in args), {key: opened(item) for key, item in kwargs.items()}

    def _shut(self, *_: Any) -> None:
        self._inside -= 1

    def opened(self, tensor: Tensor) -> Tensor:
        """Returns a tensor for use on shares: all positions of one that is sharded over them."""
        now = self._now
        if now is not None and self._is_shard(tensor, now):
            return open_sequence(tensor, now.dim, now.lengths, self._group)
        if now is not None and (tensor.dim() != len(now.shape) or tensor.shape[-1] != now.shape[-1]):
            return tensor  # no hidden state: a position bias per head, of which a rank has its own
        return copy_to_ranks(tensor, self._group) if tensor.is_floating_point() else tensor

    def closed(self, tensor: Tensor, dim: int | None) -> Tensor | None:
        """Returns this rank's positions of the sum over the ranks, None if the tensor is none of the running stack.

        Args:
            tensor: the output of a layer that ends a region; rows and positions may lie in one dim.
            dim: where the positions are, if the caller knows.
        """
        now = self._now
        if now is None:
            return None
        where = now.dim if dim is None else dim
        total = sum(now.lengths)
        if tensor.dim() == len(now.shape) and tensor.shape[where] == total:
            return close_sequence(tensor, where, now.lengths, self._group)
        if tensor.dim() == 2 and tensor.shape[0] == math.prod(now.shape[:-1]):
            unfolded = tensor.view(*now.shape[:-1], tensor.shape[-1])
            flat = close_sequence(unfolded, now.dim, now.lengths, self._group).flatten(0, -2)
            self._flat.append(flat)
            return flat
        return None

    def follow(self, folded: Tensor, made: Tensor) -> Tensor:
        """Returns what was made of a tensor of ``closed``, known as one from now on."""
        if any(folded is flat for flat in self._flat):
            self._flat.append(made)
        return made

    def is_shard(self, tensor: Any) -> bool:
        """Returns whether a tensor holds this rank's positions."""
        return self._now is not None and isinstance(tensor, Tensor) and self._is_shard(tensor, self._now)

    def _is_shard(self, tensor: Tensor, now: _Positions) -> bool:
        expected = list(now.shape)
        expected[now.dim] = now.lengths[self._rank]
        return tensor.is_floating_point() and list(tensor.shape) == expected

    def view(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a view in which the length of the whole stands for this rank's, of what ``closed`` has folded."""
        x = args[0]
        now = self._now
        given = args[1:] or tuple(kwargs.values())
        if now is None or not given or not any(x is flat for flat in self._flat):
            return func(*args, **kwargs)
        sizes = list(given[0]) if isinstance(given[0], (tuple, list)) else list(given)
        total = sum(now.lengths)
        if -1 not in sizes and math.prod(sizes) != x.numel() and len(sizes) > now.dim and sizes[now.dim] == total:
            sizes[now.dim] = now.lengths[self._rank]
        return func(x, tuple(sizes))
