"""Whole parameters that are used on sharded tensors: each rank's gradient of one is its share of a sum."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_calls import Sharing
from lightning_pardist.describe.roles_state import State, results
from lightning_pardist.describe.roles_trace import Event, Trace
from lightning_pardist.specs.tensor_roles import PartialParameter

_LINEAR = frozenset("linear matmul bmm mm mv rmatmul addmm baddbmm einsum multi_head_attention_forward".split())


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
