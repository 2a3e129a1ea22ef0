"""Cuts a module into the stages of one rank, in place: nobody's weights but its own, and blocks that can stand in.

The module tree stays whole, and with it every name, attribute and method that the user's code relies on. What is not
this rank's is a NaN that takes no memory: a value made from it can never be silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import current_autograd_node
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel, PipelineCut


def cut_stages(model: ParallelModel, device: torch.device) -> PipelineCut:
    """Gives rank 0's weights to the ranks that hold them and drops all others; every rank must call it.

    Meta tensors that this rank holds stay what they are, to be made later.
    """
    plan, meshes, module = model.plan.pipeline, model.meshes, model.module
    assert plan is not None and meshes is not None
    rank = meshes.pipeline_rank
    held = plan.held_by(rank)
    absent = frozenset(name for name, _ in module.named_parameters()) - held
    for name, parameter in module.named_parameters():
        is_real = not parameter.is_meta and device.type != "meta"
        whole = _from_first_rank(parameter, device) if is_real else None
        if name in absent:
            _drop(parameter, device)
        elif whole is not None:
            parameter.data = whole
    for buffer in module.buffers():
        if not buffer.is_meta and device.type != "meta":
            buffer.data = _from_first_rank(buffer, device)
    return PipelineCut(
        plan=plan,
        rank=rank,
        absent=absent,
        uncounted=frozenset(name for name, ranks in plan.shared_parameters if rank in ranks[1:]),
        foreign_buffers=frozenset(_foreign_buffers(model, held, rank)),
        seed=_common_seed(meshes),
    )


def install_stand_ins(model: ParallelModel) -> None:
    """Lets blocks ask, at every call, whether this stage runs them. After sharding: our hooks must be the last."""
    cut = model.pipeline
    assert cut is not None
    for index, name in enumerate(cut.plan.blocks):
        block = model.module.get_submodule(name)
        owner = cut.plan.stage_of(index).index
        is_here = any(stage.index == owner for stage in cut.plan.stages_of(cut.rank))
        block.forward = _asking(cut, index, name, block.forward, is_here=is_here)
        block.register_forward_hook(_telling(cut, index))
    for name in cut.plan.idle_blocks:
        model.module.get_submodule(name).register_forward_pre_hook(_refusing(name))


def _asking(
    cut: PipelineCut, index: int, name: str, forward: Callable[..., Any], *, is_here: bool
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        listener = cut.listener
        if listener is None and not is_here:
            raise RuntimeError(
                message(
                    "Under pipeline parallelism the whole model can be called in steps only: stages take turns there.",
                    got=f"a call of {name}, which lives on pipeline rank {cut.plan.stage_of(index).rank}, not on "
                    f"{cut.rank}",
                    source="code outside training_step, validation_step, test_step and predict_step (or generate())",
                    change="move the call into a step, or run it from a checkpoint without pipeline parallelism",
                )
            )
        if not cut.plan.draws_random or not torch.is_grad_enabled():
            return (
                listener.stand_in(index, args, kwargs)
                if listener and listener.replaces(index)
                else forward(*args, **kwargs)
            )
        return _with_own_numbers(cut, index, forward, args, kwargs)

    return call


def _with_own_numbers(
    cut: PipelineCut, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a block with random numbers of its own.

    Code outside of blocks runs on several stages and must draw the same numbers on each, so every block, here or not,
    takes exactly one number of that stream. A recomputation in the backward pass finds the stream as it was, and so
    repeats the block's numbers.
    """
    seed = int(torch.randint(0, 2**62, ()))
    listener = cut.listener
    if listener is not None and listener.replaces(index):
        return listener.stand_in(index, args, kwargs)
    with torch.random.fork_rng(devices=_cuda_devices(args, kwargs)):
        torch.manual_seed(seed)
        return forward(*args, **kwargs)


def _refusing(name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        raise RuntimeError(
            message(
                "A step must call the blocks that the described step called: the others belong to no stage.",
                got=f"a call of {name}, which the described step did not call",
                source="a step on this batch, against the step on the first batch (or sample_batch)",
                change="give a sample_batch for which the step calls every block, or do not use pipeline parallelism",
            )
        )

    return hook


def _cuda_devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.device]:
    found = {v.device for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.device.type == "cuda"}
    return sorted(found, key=str)


def _telling(cut: PipelineCut, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        listener = cut.listener
        # A block that is recomputed in the backward pass was seen before.
        if listener is not None and current_autograd_node() is None and not listener.replaces(index):
            listener.left(index, output)

    return hook


def _from_first_rank(tensor: Tensor, device: torch.device) -> Tensor:
    whole = tensor.detach().to(device).contiguous()
    if whole.numel():
        # As bytes, so that every dtype passes.
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
    return whole.view_as(tensor) if tensor.dim() else whole


def _drop(parameter: nn.Parameter, device: torch.device) -> None:
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    one = torch.full((), value, dtype=parameter.dtype, device=device)
    nothing = one.expand(parameter.shape)
    if parameter.is_meta or device.type == "meta":
        torch.utils.swap_tensors(parameter, nn.Parameter(nothing, requires_grad=parameter.requires_grad))
    else:
        parameter.data = nothing


def _foreign_buffers(model: ParallelModel, held: frozenset[str], rank: int) -> list[str]:
    """Names of buffers that another rank keeps: what steps write there, and what lies in another stage's blocks."""
    plan = model.plan.pipeline
    assert plan is not None
    written = dict(plan.foreign_buffers)
    owners = {name: plan.stage_of(index).rank for index, name in enumerate(plan.blocks)}
    found = []
    for name, _ in model.module.named_buffers():
        inside = next((owner for block, owner in owners.items() if name.startswith(block + ".")), rank)
        if written.get(name, inside) != rank:
            found.append(name)
    return found


def _common_seed(meshes: Meshes) -> int:
    box: list[int] = [torch.initial_seed() % 2**62]
    dist.broadcast_object_list(box, src=0, group=meshes.control)
    return box[0]
