"""Proves a tensor-parallel plan before training: one region of each kind, sharded against whole, by numbers.

The smallest module around a region is copied with random weights and called as the observed step called it, forward and
backward, once whole and once on the ranks' shares. Outputs, and the gradients of inputs and parameters, must agree.
Costs the memory of that module, twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.apply import TensorCutter, local_part
from lightning_pardist.base.errors import message
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.words import dtype_from_word
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.run.tensor_gradients import PartialGradients
from lightning_pardist.run.tensor_mode import TensorMode
from lightning_pardist.run.tensor_ops import Alone
from lightning_pardist.run.whole_sizes import held_indices
from lightning_pardist.specs.parallel_plan import DataParallelPlan, ParallelPlan, PrecisionPlan, StateBytes
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import RegionProbe, TensorLeaf
from lightning_pardist.torch_dtensor_api import local_tensor

TOLERANCE = 1e-4
"""Of the largest element: rounding of fp32 sums in another order stays two orders below, a wrong layout far above."""
LARGEST_BYTES = 2 << 30
"""Modules with more parameters than this are not tried alone (a region that spans many blocks)."""


@dataclass
class _Run:
    """What one forward and backward pass gave."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    """By their place among the tensors that are returned."""
    inputs: list[Tensor | None] = field(default_factory=list)
    """Gradients of the inputs."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Gradients by name."""


def prove_plan(
    module: nn.Module, plan: TensorPlan, probes: Sequence[RegionProbe], meshes: Meshes, device: torch.device
) -> TensorPlan:
    """Returns the plan with notes on what was proved; every rank must call it.

    Raises:
        ValueError: on all ranks, naming the module, if a region computes something else on shares.
    """
    kept = {index for index, share in enumerate(plan.shares) if share is not None}
    largest, proved, notes = 0.0, 0, list(plan.notes)
    for probe in probes:
        if not kept.intersection(probe.regions):
            continue
        top = module.get_submodule(probe.module)
        if sum(p.numel() * p.element_size() for p in top.parameters()) > LARGEST_BYTES:
            notes.append(f"{probe.module} was not tried alone: it is larger than {LARGEST_BYTES >> 30} GiB")
            continue
        difference, problem, skipped = _prove(top, plan, probe, meshes, device)
        everybody = gather_objects((difference, problem, skipped), meshes)
        if reasons := [text for _, _, text in everybody if text]:
            notes.append(f"{probe.module} could not be tried alone: {reasons[0]}")
            continue
        wrong = [(rank, text) for rank, (_, text, _) in enumerate(everybody) if text]
        if wrong:
            raise _refusal(probe, *wrong[0])
        largest, proved = max(largest, *(value for value, _, _ in everybody)), proved + 1
    notes.append(f"{proved} kind(s) of region tried against the whole module: differences up to {largest:.1e}")
    return replace(plan, notes=tuple(notes))


def _refusal(probe: RegionProbe, rank: int, problem: str) -> ValueError:
    return ValueError(
        message(
            "A region must compute the same on shares as on the whole.",
            got=f"{probe.module}: {problem} (rank {rank})",
            source="the plan derived from the flow of data, tried on the module with random weights",
            change=f"keep it whole with TensorOptions(plan={{'{probe.module}.<layer>': 'replicate'}}), write sizes "
            "that follow the tensors (-1, head_dim) instead of numbers of heads, or TensorOptions(verify='off')",
        )
    )


def _prove(
    top: nn.Module, plan: TensorPlan, probe: RegionProbe, meshes: Meshes, device: torch.device
) -> tuple[float, str, str]:
    """Returns the largest relative difference, what went wrong, and why it could not be tried (texts may be empty)."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(0)
        reference = _copied(top, device)
        try:
            want, masks = _reference(reference, probe, device)
        except Exception as error:  # the inputs are made up, so the module may refuse them
            return 0.0, "", _first_line(error)
        local = _part_of(plan, probe)
        model = _spread(reference, local, meshes)
        rank = int(meshes.tensor.get_local_rank())
        made = _MadeUp(probe, device, masks, partial(_share_of, probe=probe, plan=plan, rank=rank))
        want.outputs = {index: made.share(index, out) for index, out in want.outputs.items()}
        dry = _try(model, made, dry=True)
        # A rank with other sizes may fail alone: nobody may wait for it in a collective.
        if any(gather_objects(bool(dry[1]), meshes)):
            return 0.0, dry[1], ""
        got, problem = _try(model, made, dry=False)
        if got is None:
            return 0.0, problem, ""
        return (*_difference(got, want, local, rank), "")


def _share_of(position: int, out: Tensor, *, probe: RegionProbe, plan: TensorPlan, rank: int) -> Tensor:
    """Returns what a rank has of the whole of an output."""
    for shared in probe.shared_outputs:
        if shared.position == position and tuple(out.shape) == shared.shape:
            for dim in shared.dims:
                share = plan.shares[dim.region]
                if share is not None:
                    held = held_indices(dim, share, rank, out.shape[dim.dim])
                    out = out.index_select(dim.dim, held.to(out.device))
    return out


def _copied(top: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy with random weights, equal on all ranks."""
    made = copy.deepcopy(top).eval()
    for child in made.modules():
        for key, parameter in child.named_parameters(recurse=False):
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 0
            fresh = torch.randn(parameter.shape, device=device) * (fan_in**-0.5 if fan_in else 0.1)
            fresh = fresh if fan_in else fresh + (1.0 if key == "weight" else 0.0)
            child.register_parameter(key, nn.Parameter(fresh, requires_grad=True))
        for key, buffer in child.named_buffers(recurse=False):
            if buffer is not None:
                value = torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer
                value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
                setattr(child, key, value.to(device))
    return made


def _reference(module: nn.Module, probe: RegionProbe, device: torch.device) -> tuple[_Run, bool]:
    """Returns what the whole module gives, and which value of masks gave numbers."""
    for masks in (True, False):  # True means "attend" to some code, "leave out" to other
        torch.manual_seed(1)
        run = _forward_backward(module, _MadeUp(probe, device, masks))
        if all(bool(torch.isfinite(out).all()) for out in run.outputs.values()):
            run.parameters = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            module.zero_grad()
            return run, masks
        module.zero_grad()
    raise ValueError("its output is not finite on made-up inputs")


@dataclass(frozen=True)
class _MadeUp:
    """What the module is called with."""

    probe: RegionProbe
    device: torch.device
    masks: bool
    share: Callable[[int, Tensor], Tensor] = lambda position, out: out
    """Given the place of an output and the whole of it, returns what is expected of this rank."""


def _forward_backward(module: nn.Module, made: _MadeUp) -> _Run:
    leaves: list[Tensor] = []
    args = _filled(made.probe.args, made.device, made.masks, leaves)
    kwargs = _filled(made.probe.kwargs, made.device, made.masks, leaves)
    outputs = list(enumerate(tensors_in(module(*args, **kwargs))))
    trained = {index: out for index, out in outputs if out.is_floating_point() and out.requires_grad}
    generator = torch.Generator().manual_seed(2)
    whole = {shared.position: shared.shape for shared in made.probe.shared_outputs}
    total: Tensor | int = 0
    for index, out in trained.items():
        weight = made.share(index, torch.randn(whole.get(index, out.shape), generator=generator))
        total = total + (out * weight.to(made.device)).sum()
    if isinstance(total, Tensor):
        total.backward()
    return _Run({i: out.detach() for i, out in trained.items()}, inputs=[leaf.grad for leaf in leaves])


def _filled(value: Any, device: torch.device, masks: bool, leaves: list[Tensor]) -> Any:
    if isinstance(value, TensorLeaf):
        dtype = dtype_from_word(value.dtype)
        if dtype == torch.bool:
            return torch.full(value.shape, masks, device=device)
        if not dtype.is_floating_point:
            return torch.zeros(value.shape, dtype=dtype, device=device)
        made = torch.randn(value.shape, device=device)
        if value.requires_grad:
            leaves.append(made.requires_grad_())
        return made
    if type(value) in (tuple, list):
        return type(value)(_filled(item, device, masks, leaves) for item in value)
    if isinstance(value, Mapping):
        return {key: _filled(item, device, masks, leaves) for key, item in value.items()}
    return value


def _spread(reference: nn.Module, plan: TensorPlan, meshes: Meshes) -> ParallelModel:
    nothing = StateBytes(parameters=0, gradients=0, optimizer=None)
    whole = ParallelPlan(
        module_class=type(reference).__name__,
        sizes=meshes.sizes,
        precision=PrecisionPlan(name="32-true"),
        data_parallel=DataParallelPlan(kind="none", zero_stage=0),
        state_per_rank=nothing,
        state_one_process=nothing,
        traffic=(),
        tensor=plan,
    )
    model = ParallelModel(module=copy.deepcopy(reference), plan=whole, meshes=meshes)
    TensorCutter(model).cut_and_hold(model.module)
    return model


def _try(model: ParallelModel, made: _MadeUp, *, dry: bool) -> tuple[_Run | None, str]:
    assert model.meshes is not None
    mode = TensorMode(model, Alone(int(model.meshes.tensor.get_local_rank())) if dry else None)
    partial = PartialGradients(model)
    for held in model.shards:
        held.local.grad = held.stored.grad = None
        held.show_local()
    try:
        torch.manual_seed(1)
        with mode.step():
            run = _forward_backward(model.module, made)
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_line(error)}"
    finally:
        mode.remove()
        for held in model.shards:
            held.show_stored()
    if not dry:
        for held in model.shards:
            held.publish_gradient()
        partial.end_window()
        named = model.module.named_parameters()
        run.parameters = {n: local_tensor(p.grad) for n, p in named if p.grad is not None}
    return run, ""


def _difference(got: _Run, want: _Run, plan: TensorPlan, rank: int) -> tuple[float, str]:
    layouts = {layout.parameter: layout for layout in plan.layouts}
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = []
    pairs += [(f"output {i}", got.outputs.get(i), out) for i, out in want.outputs.items()]
    pairs += [(f"the gradient of input {i}", a, b) for i, (a, b) in enumerate(zip(got.inputs, want.inputs))]
    for name, whole in want.parameters.items():
        mine = local_part(whole, layouts[name], rank) if name in layouts else whole
        pairs.append((f"the gradient of {name}", got.parameters.get(name), mine))
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
        scale = float(_scale(expected, want, what))
        error = float((ours - expected).abs().max()) / scale if scale else 0.0
        largest = max(largest, error)
        if not error <= TOLERANCE:
            return largest, f"{what} is off by {error:.1e} of its largest element"
    return largest, ""


def _scale(expected: Tensor, want: _Run, what: str) -> float:
    """Returns what an error is measured against; a gradient that is zero but for rounding against the largest one."""
    own = float(expected.abs().max())
    if not what.startswith("the gradient of") or not want.parameters:
        return own
    return max(own, max(float(g.abs().max()) for g in want.parameters.values()) / 100)


def _part_of(plan: TensorPlan, probe: RegionProbe) -> TensorPlan:
    """Returns the plan of the regions inside one module, with names from there."""
    prefix, tried = probe.module, frozenset(probe.parameters)

    def inner(name: str) -> str | None:
        if name == prefix:
            return ""
        return name[len(prefix) + 1 :] if name.startswith(prefix + ".") else None

    def renamed(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            found = inner(name)
            if found is not None:
                yield found

    return replace(
        plan,
        sequence_stacks=(),
        layouts=tuple(
            replace(layout, parameter=name)
            for layout in plan.layouts
            if layout.parameter in tried and (name := inner(layout.parameter)) is not None
        ),
        uses=tuple((name, role) for full, role in plan.uses if full in tried and (name := inner(full)) is not None),
        calls=tuple(
            replace(call, module=name)
            for call in plan.calls
            if call.regions <= set(probe.regions) and (name := inner(call.module)) is not None
        ),
        quiet_modules=tuple(renamed(plan.quiet_modules)),
        partial_parameters=tuple(renamed(plan.partial_parameters)),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
