"""Recomputes and compiles blocks, in place. Neither changes a name of the module tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    blocks = {id(model.module.get_submodule(name)): name for name in plan.blocks}
    # One for all blocks: what is compiled for the first of them then serves the others.
    how = Recomputation(kept=kept, during=partial(_as_in_forward, model, blocks))
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


def _as_in_forward(
    model: ParallelModel, blocks: Mapping[int, str], block: nn.Module
) -> Callable[[], AbstractContextManager[object]]:
    """Returns what makes a context to compute a block in as now: on this rank's shares, on a tensor axis."""
    name = blocks.get(id(block))  # None for a copy of a block
    return nullcontext if model.tensor_mode is None or name is None else model.tensor_mode.again(name)
