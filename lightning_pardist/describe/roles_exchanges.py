"""What a tensor axis would have to exchange in one step, weight by weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from lightning_pardist.base.function_names import CONTRACTIONS
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.roles_state import results
from lightning_pardist.describe.roles_trace import Event, Trace
from lightning_pardist.specs.tensor_roles import WeightRole

_LINEAR = CONTRACTIONS | {"multi_head_attention_forward"}
_SHARED_INPUTS = 4
"""As many inputs as ``run`` remembers, so that queries, keys and values of one input are summed once."""


def exchanges(trace: Trace, weights: Sequence[WeightRole]) -> Iterator[tuple[str, int]]:
    """Yields (parameter, bytes) of every all-reduce.

    A row layer sums its output in the forward pass, a layer that opens a region the gradient of its input in the
    backward pass (once for all layers with the same input), a table over the vocabulary its output, and a cross entropy
    of sharded logits takes a maximum and two sums of one number per row.
    """
    roles = {weight.parameter: weight for weight in weights if weight.role != "replicate"}
    known = {id(trace.parameters[name]): name for name in roles}
    opened: deque[int] = deque(maxlen=_SHARED_INPUTS)
    for event in trace.events:
        inputs = list(tensors_in((event.args, event.kwargs)))
        names = [known[id(tensor)] for tensor in inputs if id(tensor) in known]
        if event.name == "cross_entropy":
            yield from _losses(event, roles)
        elif event.name == "embedding" and names and roles[names[0]].role == "vocab":
            yield names[0], _nbytes(next(results(event)))
        elif event.name in _LINEAR and names:
            yield from _linear(event, names, roles, inputs, opened)


def _linear(
    event: Event,
    names: Sequence[str],
    roles: Mapping[str, WeightRole],
    inputs: Sequence[torch.Tensor],
    opened: deque[int],
) -> Iterator[tuple[str, int]]:
    openers = [name for name in names if roles[name].role != "row"]
    for name in names:
        if roles[name].role == "row":
            yield name, _nbytes(next(results(event)))
    if not openers:
        return
    for tensor in inputs:
        is_activation = tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter) and tensor.dim() >= 2
        if is_activation and id(tensor) not in opened:
            opened.append(id(tensor))
            yield openers[0], _nbytes(tensor)


def _losses(event: Event, roles: Mapping[str, WeightRole]) -> Iterator[tuple[str, int]]:
    logits = event.args[0] if event.args else event.kwargs["input"]
    dim = 1 if logits.dim() > 1 else 0
    heads = [r for r in roles.values() if r.role == "vocab" and r.shape[r.dim or 0] == logits.shape[dim]]
    smoothing = event.kwargs.get("label_smoothing") or (event.args[7] if len(event.args) > 7 else 0.0)
    if heads:
        rows = logits.numel() // logits.shape[dim]
        itemsize = max(logits.dtype.itemsize, 4)
        yield heads[-1].parameter, rows * itemsize
        yield heads[-1].parameter, rows * itemsize * (3 if smoothing else 2)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
