"""Whole parameters that are used on sharded tensors: each rank's gradient of one is its share of a sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_pardist.base.function_names import CONTRACTIONS
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_sharing import Sharing
from lightning_pardist.describe.roles_state import State, argument, results
from lightning_pardist.describe.roles_trace import Event, Trace
from lightning_pardist.specs.tensor_roles import PartialParameter

_LINEAR = CONTRACTIONS | {"multi_head_attention_forward"}
_BIAS = {"linear": (2, "bias"), "addmm": (0, "input"), "baddbmm": (0, "input")}


def partial_parameters(trace: Trace, sharing: Sharing, state: State) -> Iterator[PartialParameter]:
    """Yields the whole parameters that meet sharded tensors, with the regions where they do."""
    regions: dict[str, dict[int, None]] = {}
    elsewhere: set[str] = set()
    shared = {name for name, p in trace.parameters.items() if sharing.is_shared(p)}
    for event in trace.events:
        inputs = list(tensors_in((event.args, event.kwargs)))
        names = {name for tensor in inputs for name in state.tag(tensor).weights} - shared
        met = {dim.region: None for tensor in inputs for dim in sharing.dims(tensor)} if names else {}
        if not met:
            if names and not any(state.tag(out).weights for out in results(event)):
                elsewhere |= names  # it went into an activation, which every rank has whole
        elif not _is_closing(event, sharing, state):  # else its bias is added after the sum over the ranks
            for name in sorted(names):
                regions.setdefault(name, {}).update(met)
    for name, found in regions.items():
        yield PartialParameter(name=name, regions=tuple(found), is_whole_elsewhere=name in elsewhere)


def _is_closing(event: Event, sharing: Sharing, state: State) -> bool:
    """Returns whether a linear layer contracts what is shared, or makes what is shared out of a whole tensor."""
    if event.name not in _LINEAR:
        return False
    return any(sharing.is_shared(t) and state.tag(t).weights for t in tensors_in((event.args, event.kwargs)))


def added_biases(trace: Trace, state: State) -> dict[str, tuple[str, ...]]:
    """Returns, by weight, the parameters that its linear layers add to their output."""
    found: dict[str, dict[str, None]] = {}
    for event in trace.events:
        bias = argument(event, *_BIAS[event.name]) if event.name in _BIAS else None
        if not isinstance(bias, torch.Tensor):
            continue
        names = sorted(state.tag(bias).weights)
        for tensor in tensors_in((event.args, event.kwargs)):
            for weight in state.tag(tensor).weights if tensor is not bias else ():
                found.setdefault(weight, {}).update(dict.fromkeys(names))
    return {weight: tuple(names) for weight, names in found.items()}
