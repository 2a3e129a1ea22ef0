"""What sequence parallel needs to know of a stack: how its blocks were called, and what happens between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.words import common_module
from lightning_pardist.describe.roles_probes import region_members, region_probe
from lightning_pardist.describe.roles_shapes import elementwise
from lightning_pardist.describe.roles_sharing import Sharing
from lightning_pardist.describe.roles_state import RULES
from lightning_pardist.describe.roles_trace import Event, Trace
from lightning_pardist.specs.model_profile import StackProfile
from lightning_pardist.specs.tensor_roles import RegionProbe, StackProbe, TensorRoles


def stack_probes(
    module: nn.Module, trace: Trace, stacks: Sequence[StackProfile], roles: TensorRoles, sharing: Sharing
) -> Iterator[StackProbe]:
    """Yields what is to be tried of every stack whose blocks were seen.

    One block of each kind; if a region reaches over several blocks (a position bias that all share), the smallest
    module around the whole stack instead.
    """
    for stack in stacks:
        blocks = tuple(block.name for block in stack.blocks)
        if not all(name in trace.module_calls for name in blocks) or not all(b.inputs for b in stack.blocks):
            continue
        hidden = stack.blocks[0].inputs[0].name
        yield StackProbe(
            blocks=blocks,
            between=_between(trace, blocks, hidden),
            probes=tuple(_probes(module, trace, blocks, roles, sharing)),
        )


def _probes(
    module: nn.Module, trace: Trace, blocks: Sequence[str], roles: TensorRoles, sharing: Sharing
) -> Iterator[RegionProbe]:
    members = {region.index: region_members(region, roles.calls) for region in roles.regions}
    around = common_module(blocks)
    for names in members.values():
        if sum(any(_is_in(name, block) for name in names) for block in blocks) > 1:
            around = common_module([around, *names])
            if around and around in trace.module_calls:
                inside = tuple(i for i, n in members.items() if all(_is_in(name, around) for name in n))
                yield region_probe(trace, around, inside, roles.regions, sharing)
            return
    seen: set[object] = set()
    for block in blocks:
        kind = _kind(module.get_submodule(block))
        if kind not in seen:
            seen.add(kind)
            inside = tuple(i for i, n in members.items() if all(_is_in(name, block) for name in n))
            yield region_probe(trace, block, inside, roles.regions, sharing)


def _kind(block: nn.Module) -> tuple[object, ...]:
    classes = tuple(type(child).__qualname__ for child in block.modules())
    return classes, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def _is_in(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def _between(trace: Trace, blocks: Sequence[str], hidden: str) -> str:
    """Returns what the code between the blocks does with the hidden state that cannot be done position by position."""
    ends = [next(iter(tensors_in(trace.module_calls[name].output)), None) for name in blocks[:-1]]
    sharded = {id(end) for end in ends if end is not None}
    inside = frozenset(blocks)
    for call in trace.calls:
        if call.event is None or any(_is_in(name, block) for name in call.modules[-1:] for block in inside):
            continue
        event = trace.events[call.event]
        if not any(id(tensor) in sharded for tensor in tensors_in((event.args, event.kwargs))):
            continue
        if not _is_by_position(event, sharded):
            where = call.modules[-1] if call.modules and call.modules[-1] else "the module itself"
            return f"{event.name}, called between the blocks by {where}"
        sharded |= {id(out) for out in tensors_in(event.out)}
    for name in blocks[1:]:
        given = trace.module_calls[name]
        into: Any = given.args[int(hidden)] if hidden.isdigit() else given.kwargs.get(hidden)
        if id(into) not in sharded:
            return f"{name} is called with another tensor than the block before it gave back"
    return ""


def _is_by_position(event: Event, sharded: set[int]) -> bool:
    """Returns whether a call treats every position alone, with nothing that has positions or gradients of its own."""
    if RULES.get(event.name) is not elementwise:
        return False
    inputs = list(tensors_in((event.args, event.kwargs)))
    others = [tensor for tensor in inputs if id(tensor) not in sharded]
    return all(_is_one_for_all(tensor) for tensor in others)


def _is_one_for_all(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and all(size == 1 for size in tensor.shape[:-1])
