"""Recomputes and compiles blocks, in place. Neither changes a name of the module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.recomputing import (
    Recomputation,
    recompute_block,
    replace_forward,
    resolve_ops,
    unbound_forward,
)
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.specs.block_levers import CompileOptions


def recompute_blocks(model: ParallelModel) -> None:
    """Makes the blocks of the plan recompute their activations in the backward pass."""
    plan = model.plan.recompute
    kept = frozenset(operator for overloads in resolve_ops(plan.ops).values() for operator in overloads)
    how = Recomputation(kept=kept, during=_scalars_as_in_forward(model))
    for name in plan.blocks:
        recompute_block(model.module.get_submodule(name), how)


def compile_blocks(model: ParallelModel) -> None:
    """Compiles the forward of every block of the plan.

    The forward and not the call, so that hooks (fully_shard's are some) stay outside: they gather before and free after
    the compiled code, which sees ordinary parameters.
    """
    plan = model.plan.compile
    for name in plan.blocks:
        _compile(model.module.get_submodule(name), plan.options)


def _compile(block: nn.Module, options: CompileOptions) -> None:
    # A function of the block, not a method bound to it: a deep copy of the block then runs on the copy's parameters.
    compiled: Callable[..., Any] = torch.compile(
        unbound_forward(block), backend=options.backend, fullgraph=options.fullgraph, dynamic=options.dynamic
    )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, *args, **kwargs)

    replace_forward(block, forward)


def _scalars_as_in_forward(model: ParallelModel) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which held scalars are the plain tensors that the forward pass saw."""

    @contextmanager
    def during() -> Iterator[None]:
        with ExitStack() as stack:
            for held in model.scalars:
                if not held.is_local:
                    stack.callback(held.show_stored)
                    held.show_local()
            yield

    return during
