"""Compares a run on a rank's shares with the same run on the whole module, by numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_pardist.apply import local_part
from lightning_pardist.specs.tensor_plan import TensorPlan

TOLERANCE = 1e-4
"""Of the largest element: rounding of fp32 sums in another order stays two orders below, a wrong layout far above."""


@dataclass
class Run:
    """What one forward and backward pass gave."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    """By their place among the tensors that are returned."""
    inputs: list[Tensor | None] = field(default_factory=list)
    """Gradients of the inputs."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Gradients by name."""
    named: dict[str, Tensor] = field(default_factory=dict)
    """What else must agree: logged values, buffers."""
    inner: dict[str, Tensor] = field(default_factory=dict)
    """First outputs of the modules inside, in the order in which they ended."""


def keep_share(run: Run, plan: TensorPlan, rank: int) -> None:
    """Drops the gradients of other ranks' shares, one by one: the whole and its copy are never there together."""
    layouts = {layout.parameter: layout for layout in plan.layouts}
    for name in run.parameters.keys() & layouts.keys():
        run.parameters[name] = local_part(run.parameters[name], layouts[name], rank)


def difference(got: Run, want: Run) -> tuple[float, str]:
    """Returns the largest relative difference, and what is wrong, if anything.

    Args:
        got: of a run on this rank's shares.
        want: what this rank has of the same run on the whole module.
    """
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = []
    pairs += [(f"output {i}", got.outputs.get(i), out) for i, out in want.outputs.items()]
    pairs += [(f"the gradient of input {i}", a, b) for i, (a, b) in enumerate(zip(got.inputs, want.inputs))]
    pairs += [(name, got.named.get(name), want.named.get(name)) for name in want.named.keys() | got.named.keys()]
    pairs += [(f"the gradient of {n}", got.parameters.get(n), mine) for n, mine in want.parameters.items()]
    largest = 0.0
    for what, ours, expected in pairs:
        if ours is None or expected is None:
            if (ours is None) != (expected is None):
                return largest, f"{what} exists on one side only"
            continue
        if ours.shape != expected.shape:
            return largest, f"{what} has the shape {tuple(ours.shape)}, not {tuple(expected.shape)}"
        if not ours.numel():
            continue
        error = _error(ours, expected, _scale(expected, want, what))
        largest = max(largest, error)
        if not error <= TOLERANCE:
            return largest, f"{what} is off by {error:.1e} of its largest element"
    return largest, ""


def _error(ours: Tensor, expected: Tensor, scale: float) -> float:
    return float((ours - expected).abs().max()) / scale if scale else 0.0


def _scale(expected: Tensor, want: Run, what: str) -> float:
    """Returns what an error is measured against; a gradient that is zero but for rounding against the largest one."""
    own = float(expected.abs().max())
    if not what.startswith("the gradient of") or not want.parameters:
        return own
    return max(own, max(float(g.abs().max()) for g in want.parameters.values()) / 100)


def first_that_differs(top: nn.Module, got: Run, want: Run, plan: TensorPlan, rank: int) -> str:
    """Returns which module is the first to give other values for its positions, if one does."""
    for name, ours in got.inner.items():
        if name not in want.inner:
            continue
        mine = _positions_of_rank(want.inner[name], ours.shape, plan.size, rank)
        kind = type(top.get_submodule(name)).__name__
        if mine is None:
            return f"{name} ({kind}) is the first to give another shape"
        if not _error(ours, mine, float(mine.abs().max())) <= TOLERANCE:
            return f"{name} ({kind}) is the first to give other values"
    return ""


def _positions_of_rank(whole: Tensor, shape: torch.Size, size: int, rank: int) -> Tensor | None:
    """Returns the rank's part of the one dim that differs, None if that is not what differs."""
    if whole.dim() != len(shape):
        return None
    for dim in (d for d in range(whole.dim()) if whole.shape[d] != shape[d]):
        each, left = divmod(whole.shape[dim], size)
        whole = whole.narrow(dim, each * rank + min(rank, left), each + (rank < left))
    return whole if whole.shape == shape else None
