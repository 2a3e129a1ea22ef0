"""A block that computes its activations again in the backward pass: how, for describe (foretells) and apply (does).

The block stays the module it is, with the names it has: only its ``forward`` is replaced, by a method that runs the
original one under torch's non-reentrant checkpoint. The method is bound to the block, so a deep copy of the block calls
the copy's own layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_pardist.base.batch_norm import is_batch_norm
from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import OpOverload, own_buffers, version_counter

EXPENSIVE_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""What ``selective`` keeps by default: results that cost most to compute again for the bytes they take."""


@dataclass(frozen=True)
class Recomputation:
    """How one block is recomputed."""

    kept: frozenset[OpOverload] = frozenset()
    """Operators whose results are kept; empty: nothing but the block's inputs."""
    during: Callable[[nn.Module], Callable[[], AbstractContextManager[object]]] = lambda block: nullcontext
    """Called in a block's forward pass, outside compiled code; returns what makes a context for each recomputation."""
    note: Callable[[OpOverload, Any], None] | None = None
    """Told of every result that is kept."""


def recompute_block(block: nn.Module, how: Recomputation) -> None:
    """Makes a block recompute its activations, in place."""
    inner, selective = unbound_forward(block), bool(how.kept)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        names, count = tuple(kwargs), len(args)

        def run(*flat: Any) -> Any:
            return inner(self, *flat[:count], **dict(zip(names, flat[count:])))

        if torch.compiler.is_compiling():
            # In two calls: the compiler takes what it can see to be torch's default, or a partial made right here.
            if not selective:
                return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=partial(_selective, how))
        run = _from_the_same_caches(run, (*args, *kwargs.values()))
        before = {name: version_counter(buffer) for name, buffer in self.named_buffers()}
        # Positional, so that torch keeps tensors among the keyword arguments as it keeps others.
        out = checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=partial(_contexts, self, how))
        _check_unwritten(self, before)
        return out

    replace_forward(block, forward)


def unbound_forward(block: nn.Module) -> Callable[..., Any]:
    """Returns the block's forward as a function whose first argument is the block."""
    own = vars(block).get("forward")
    if own is None:
        return type(block).forward
    if isinstance(own, MethodType) and own.__self__ is block:
        return own.__func__
    return lambda _block, *args, **kwargs: own(*args, **kwargs)


def replace_forward(block: nn.Module, forward: Callable[..., Any]) -> None:
    """Makes ``forward`` (whose first argument is the block) the block's forward."""
    block.forward = MethodType(forward, block)


def resolve_ops(names: Sequence[str]) -> dict[str, frozenset[OpOverload]]:
    """Returns name -> all overloads of the operator that it means.

    Raises:
        ValueError: for a name that is no operator of torch.
    """
    return {name: _overloads(name) for name in names}


def _overloads(name: str) -> frozenset[OpOverload]:
    parts = name.removeprefix("torch.ops.").split(".")
    space, *rest = parts if len(parts) > 1 else ("aten", *parts)
    try:
        packet = getattr(getattr(torch.ops, space), rest[0])
        chosen = rest[1:] or packet.overloads()
        return frozenset(getattr(packet, overload) for overload in chosen)
    except AttributeError as error:
        raise ValueError(
            message(
                "RecomputeOptions.ops must name operators of torch.",
                got=f"{name!r}",
                source="RecomputeOptions(ops=...)",
                change='write "mm" or "aten.mm" for torch.ops.aten.mm, "my_library.my_op" for your own',
            )
        ) from error


def _selective(how: Recomputation) -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in how.kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if how.note is not None and not context.is_recompute:
            how.note(operator, context.op_output)
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def _contexts(block: nn.Module, how: Recomputation) -> tuple[Any, Any]:
    first, again = _selective(how) if how.kept else (nullcontext(), nullcontext())
    return first, _Recomputing(block, how.during(block), again)


def _from_the_same_caches(run: Callable[..., Any], given: Sequence[Any]) -> Callable[..., Any]:
    """Returns ``run`` that gives key-value caches to its second and later calls as the first call found them.

    Models of transformers fill a cache in training too, unless told otherwise; a recomputation that found its own keys
    there already would attend to them twice.
    """
    before = {position: _copy_of_cache(value) for position, value in enumerate(given) if _is_cache(value)}
    if not before:
        return run
    calls = 0

    def rerun(*flat: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return run(*flat)
        return run(*(_copy_of_cache(before[i]) if i in before else value for i, value in enumerate(flat)))

    return rerun


def _is_cache(value: object) -> bool:
    return any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__)


def _copy_of_cache(cache: Any) -> Any:
    """Returns a copy that shares tensors: a cache that grows replaces its tensors, it does not write to them."""
    tensors = [value for layer in getattr(cache, "layers", ()) for value in vars(layer).values()]
    tensors += list(vars(cache).values())
    return copy.deepcopy(cache, {id(value): value for value in tensors if isinstance(value, Tensor)})


class _Recomputing:
    """A context that can be entered once per backward pass through the block: torch makes it once, in forward."""

    def __init__(
        self,
        block: nn.Module,
        during: Callable[[], AbstractContextManager[object]],
        again: AbstractContextManager[object],
    ) -> None:
        self._block, self._during, self._again = block, during, again
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._during())
            stack.enter_context(_throwaway_statistics(self._block))
            stack.enter_context(self._again)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@contextmanager
def _throwaway_statistics(block: nn.Module) -> Iterator[None]:
    """Lets batch norms write their running statistics into copies: the forward pass has counted this batch already."""
    held: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    for module in block.modules():
        if is_batch_norm(module) and module.training:
            buffers = own_buffers(module)
            held.append((module, dict(buffers)))
            buffers.update({name: None if b is None else b.detach().clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in held:
            own_buffers(module).update(buffers)


def _check_unwritten(block: nn.Module, before: dict[str, int]) -> None:
    statistics = {
        f"{name}.{key}" if name else key
        for name, module in block.named_modules()
        if is_batch_norm(module)
        for key, _ in module.named_buffers(recurse=False)
    }
    for name, buffer in block.named_buffers():
        if name not in statistics and before.get(name) != version_counter(buffer):
            raise ValueError(
                message(
                    "A recomputed block runs forward twice per step, so it must not write to its buffers.",
                    got=f"{type(block).__name__} writes to its buffer {name!r}",
                    source="the strategy's argument recompute, and the block's forward",
                    change="leave these blocks out with RecomputeOptions(blocks=[...]), or set recompute=None",
                )
            )
