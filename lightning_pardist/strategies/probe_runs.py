"""Runs one module on made-up inputs, whole and on the ranks' shares, forward and backward, and compares by numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.apply import TensorCutter
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.describe.blame import blame
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.run.tensor_gradients import PartialGradients
from lightning_pardist.run.tensor_mode import TensorMode, alone_on
from lightning_pardist.run.whole_sizes import held_indices
from lightning_pardist.specs.parallel_plan import DataParallelPlan, ParallelPlan, PrecisionPlan, StateBytes
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import RegionProbe
from lightning_pardist.strategies.probe_compare import Run, difference, first_that_differs, keep_share
from lightning_pardist.strategies.probe_inputs import MadeUp, candidates
from lightning_pardist.torch_dtensor_api import local_tensor

Share = Callable[[int, Tensor], Tensor]
"""Given the place of an output and the whole of it, returns what is expected of this rank."""


@dataclass(frozen=True)
class Verdict:
    """What one rank saw."""

    difference: float = 0.0
    """The largest one, relative."""
    problem: str = ""
    """What went wrong, if anything."""
    culprit: str = ""
    """The first module inside that goes wrong, if that is known."""
    skipped: str = ""
    """Why the module could not be tried, if it could not."""


def try_on_shares(
    top: nn.Module, plan: TensorPlan, probe: RegionProbe, meshes: Meshes, device: torch.device
) -> Verdict:
    """Returns how a copy of a module with random weights does on shares; every rank must call it.

    Args:
        top: the module; it stays as it is.
        plan: of what lies in it, with names from there.
        probe: how it was called.
        meshes: the live mesh.
        device: where to run.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(0)
        reference = _copied(top, device)
        watched = _between_regions(reference, plan)
        try:
            with _attributes_kept(reference):  # a bias of all heads that it caches is not a share's
                want, made = _reference(reference, probe, device, watched)
        except Exception as error:  # the inputs are made up, so the module may refuse them
            return Verdict(skipped=first_line(error))
        rank = int(meshes.tensor.get_local_rank())
        keep_share(want, plan, rank)
        model = cut_copy(reference, plan, meshes)
        del reference
        share = partial(_share_of, probe=probe, plan=plan, rank=rank)
        want.outputs = {index: share(index, out) for index, out in want.outputs.items()}
        with _attributes_kept(model.module):
            dry = _run_on_shares(model, made, share, (), dry=True)
        # A rank with other sizes may fail alone: nobody may wait for it in a collective.
        if any(gather_objects(isinstance(dry, str), meshes)):
            return Verdict(problem=dry if isinstance(dry, str) else "")
        got = _run_on_shares(model, made, share, watched, dry=False)
        if isinstance(got, str):
            return Verdict(problem=got)
        largest, problem = difference(got, want)
        culprit = first_that_differs(top, got, want, plan, rank) if problem else ""
        return Verdict(difference=largest, problem=problem, culprit=culprit)


def _copied(top: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy with random weights, equal on all ranks."""
    made = copy.deepcopy(top)
    made.eval()  # returns nothing where a module has a train() of its own that does not
    for child in made.modules():
        for key, parameter in child.named_parameters(recurse=False):
            fan_in = math.prod(parameter.shape[1:]) if parameter.dim() > 1 else 0
            fresh = torch.randn(parameter.shape, device=device).mul_(fan_in**-0.5 if fan_in else 0.1)
            fresh = fresh if fan_in else fresh.add_(1.0 if key == "weight" else 0.0)
            child.register_parameter(key, nn.Parameter(fresh, requires_grad=True))
        for key, buffer in child.named_buffers(recurse=False):
            if buffer is not None:
                value = torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer
                value = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
                setattr(child, key, value.to(device))
    return made


@contextmanager
def _attributes_kept(top: nn.Module) -> Iterator[None]:
    """Undoes what a run changes in the plain attributes of modules, caches among them."""
    modules = list(top.modules())
    before = [
        {key: copy.copy(value) if type(value) in (dict, list, set) else value for key, value in vars(module).items()}
        for module in modules
    ]
    yield
    own = set(vars(nn.Module()))
    for module, kept in zip(modules, before, strict=True):
        for key in vars(module).keys() - kept.keys():
            delattr(module, key)
        vars(module).update({key: value for key, value in kept.items() if key not in own})


def _between_regions(module: nn.Module, plan: TensorPlan) -> tuple[str, ...]:
    """Returns the modules that work on shares of the sequence."""
    around = [name for stack in plan.sequence_stacks for name in stack.around_regions]
    names = [name for name, _ in module.named_modules() if name] if plan.sequence_stacks else []
    return tuple(n for n in names if not any(n == other or n.startswith(other + ".") for other in around))


def _reference(
    module: nn.Module, probe: RegionProbe, device: torch.device, watched: Collection[str]
) -> tuple[Run, MadeUp]:
    """Returns what the whole module gives, and for which inputs it gave numbers."""
    refused: Exception = ValueError("its output is not finite on made-up inputs")
    for made in candidates(probe, device):
        torch.manual_seed(1)
        try:
            run = _forward_backward(module, made, _all_of, watched)
        except Exception as error:  # the inputs are made up, so the module may refuse them
            refused = error
            continue
        if all(bool(torch.isfinite(out).all()) for out in run.outputs.values()):
            run.parameters = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            module.zero_grad()
            return run, made
        module.zero_grad()
    raise refused


def _forward_backward(module: nn.Module, made: MadeUp, share: Share, watched: Collection[str]) -> Run:
    args, kwargs, leaves = made.call()
    run = Run()
    handles = [
        module.get_submodule(name).register_forward_hook(partial(_note_inner, run.inner, name)) for name in watched
    ]
    try:
        outputs = list(enumerate(tensors_in(module(*args, **kwargs))))
    finally:
        for handle in handles:
            handle.remove()
    trained = {index: out for index, out in outputs if out.is_floating_point() and out.requires_grad}
    generator = torch.Generator().manual_seed(2)
    total: Tensor | int = 0
    for index, out in trained.items():
        whole = torch.randn(_whole_shape(index, out, made.probe), generator=generator)
        total = total + (out * share(index, whole).to(made.device)).sum()
    if isinstance(total, Tensor):
        total.backward()
    run.outputs = {index: out.detach() for index, out in trained.items()}
    run.inputs = [leaf.grad for leaf in leaves]
    return run


def _all_of(position: int, out: Tensor) -> Tensor:
    return out


def _whole_shape(position: int, out: Tensor, probe: RegionProbe) -> list[int]:
    """Returns the shape of the whole of an output, of which a rank may have a share."""
    shape = list(out.shape)
    for shared in probe.shared_outputs:
        if shared.position == position and len(shared.shape) == len(shape):
            for dim in shared.dims:
                shape[dim.dim] = shared.shape[dim.dim]
    return shape


def _share_of(position: int, out: Tensor, *, probe: RegionProbe, plan: TensorPlan, rank: int) -> Tensor:
    """Returns what a rank has of the whole of an output."""
    for shared in probe.shared_outputs:
        if shared.position == position and out.dim() == len(shared.shape):
            for dim in shared.dims:
                share = plan.shares[dim.region]
                if share is not None and out.shape[dim.dim] == shared.shape[dim.dim]:
                    held = held_indices(dim, share, rank, out.shape[dim.dim])
                    out = out.index_select(dim.dim, held.to(out.device))
    return out


def _note_inner(inner: dict[str, Tensor], name: str, module: nn.Module, args: Any, output: Any) -> None:
    first = next((out for out in tensors_in(output) if out.is_floating_point()), None)
    if first is not None:
        inner.setdefault(name, first.detach())


def cut_copy(module: nn.Module, plan: TensorPlan, meshes: Meshes, ignored: tuple[str, ...] = ()) -> ParallelModel:
    """Returns a copy cut along the tensor axis, in place.

    Args:
        module: the copy.
        plan: how.
        meshes: the live mesh.
        ignored: parameters that stay as they are.
    """
    nothing = StateBytes(parameters=0, gradients=0, optimizer=None)
    whole = ParallelPlan(
        module_class=type(module).__name__,
        sizes=meshes.sizes,
        precision=PrecisionPlan(name="32-true"),
        data_parallel=DataParallelPlan(kind="none", zero_stage=0, ignored_parameters=ignored),
        state_per_rank=nothing,
        state_one_process=nothing,
        traffic=(),
        tensor=plan,
    )
    model = ParallelModel(module=module, plan=whole, meshes=meshes)
    TensorCutter(model).cut_and_hold(model.module)
    return model


def _run_on_shares(
    model: ParallelModel, made: MadeUp, share: Share, watched: Collection[str], *, dry: bool
) -> Run | str:
    """Returns what a run gave, or what ended it; one that is dry exchanges nothing."""
    mode = TensorMode(model, alone_on(model) if dry else None)
    partial_gradients = PartialGradients(model)
    for held in model.shards:
        held.local.grad = held.stored.grad = None
        held.show_local()
    try:
        torch.manual_seed(1)
        with mode.step():
            run = _forward_backward(model.module, made, share, watched)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}, at {blame(error)}"
    finally:
        mode.remove()
        for held in model.shards:
            held.show_stored()
    if not dry:
        for held in model.shards:
            held.publish_gradient()
        partial_gradients.end_window()
        named = model.module.named_parameters()
        run.parameters = {n: local_tensor(p.grad) for n, p in named if p.grad is not None}
    return run


def first_line(error: Exception) -> str:
    """Returns what an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
