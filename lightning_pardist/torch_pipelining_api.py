"""Stages and runs of torch.distributed.pipelining: the private names we rely on, with the reason (torch 2.11 to 2.13).

What is torch's: the schedules, their lowering to sends and receives, and the two halves of a backward pass. What is
ours: tensors' shapes are told to a stage for every micro-batch (torch takes all to be alike, and finds them out by
running the stage on garbage), and what a stage sends is made contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _batch_p2p,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _RecvInfo

from lightning_pardist import torch_dist_api
from lightning_pardist.specs.pipeline_plan import Orders
from lightning_pardist.torch_schedules_api import SCHEDULES

_SINGLE = ("gpipe", "1f1b")


@dataclass(frozen=True)
class TensorShape:
    """What a stage must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Traffic:
    """The tensors that enter and leave a stage for one micro-batch."""

    receives: tuple[TensorShape, ...]
    sends: tuple[TensorShape, ...]


# ---- stages and schedules


class UserStage(PipelineStage):
    """A stage whose tensors may have another shape in every micro-batch.

    ``PipelineStage`` has one set of shapes. What it reads of them, per micro-batch: the buffers of ``args_recv_info``
    and ``grad_recv_info``, and the gradients' shapes where it sends zeros.
    """

    def __init__(
        self, program: nn.Module, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(program, index, num_stages, device, group=group)
        self.backward_is_whole = False
        """Leave the backward passes of inputs and weights together, where a schedule would have them apart; may become
        True in the middle of a step."""
        self._whole_chunks: set[int] = set()
        self.watch: Callable[[str, int, int, Callable[[], Any]], Any] = lambda kind, stage, micro, run: run()
        """Runs every action; sees its kind, stage and micro-batch."""
        self._traffic: list[Traffic] = []

    def prepare(self, traffic: Sequence[Traffic], *, has_backward: bool) -> None:
        """Makes ready for one run of a schedule. Buffers stay as they are if the shapes do."""
        if self._traffic != list(traffic) or self.has_backward != has_backward:
            self._traffic = list(traffic)
            self.has_backward = has_backward
            self.chunks = len(traffic)
            self._make_buffers()
        self._whole_chunks.clear()
        self._stage_meta.inputs = tuple(_meta(t) for t in traffic[0].receives)
        self._stage_meta.outputs = tuple(_meta(t) for t in traffic[0].sends)
        self.backward_state.clear()
        self.dw_runner.clear()
        self.bwd_cache.clear()
        self.clear_runtime_states()

    def _make_buffers(self) -> None:
        before, after = self.stage_index - 1, self.stage_index + 1
        self.args_recv_info, self.grad_recv_info = {}, {}
        self.grad_send_info = None
        for micro, tensors in enumerate(self._traffic):
            self.args_recv_info[micro] = tuple(
                self._info(f"stage {self.stage_index} from {before}", before, shape) for shape in tensors.receives
            )
            self.grad_recv_info[micro] = tuple(
                self._info(f"gradient of stage {self.stage_index} from {after}", after, shape, is_gradient=True)
                for shape in tensors.sends
            )
        # The last stage's only output is the loss, which stays here.
        count = 1 if self.is_last else len(self._traffic[0].sends)
        self.act_send_info = {i: [] if self.is_last else [after] for i in range(count)}

    def _info(self, name: str, source: int, shape: TensorShape, *, is_gradient: bool = False) -> _RecvInfo:
        if is_gradient and not shape.requires_grad:
            return _RecvInfo(name, source, None, None)
        buffer = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
        return _RecvInfo(name, source, buffer, _meta(shape))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().forward_one_chunk
        return self.watch("F", self.stage_index, fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        if self.backward_is_whole:
            self._whole_chunks.add(bwd_chunk_id)
        self._leave_whole(bwd_chunk_id)
        run = super().backward_one_chunk
        count = len(self._traffic[bwd_chunk_id].receives)
        try:
            kind = "B" if full_backward else "I"
            self.watch(
                kind, self.stage_index, bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward)
            )
        except BackwardFailed:
            # The run goes on with zeros, so that no other rank waits; the error is raised on all ranks at its end.
            self.bwd_cache[bwd_chunk_id] = (None,) * count
            self.dw_runner.pop(bwd_chunk_id, None)
        found = self.bwd_cache.get(bwd_chunk_id)
        if found is not None:
            self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else g.contiguous() for g in found)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward or bwd_chunk_id not in self.dw_runner:
            return
        self._leave_whole(bwd_chunk_id)
        run = super().backward_weight_one_chunk
        try:
            self.watch("W", self.stage_index, bwd_chunk_id, lambda: run(bwd_chunk_id, last_backward))
        except BackwardFailed:
            self.dw_runner.pop(bwd_chunk_id, None)

    def _leave_whole(self, chunk: int) -> None:
        """Tells torch's halves of the backward pass whether the first of them does all for this micro-batch."""
        self.dw_builder = (lambda: lambda: None) if chunk in self._whole_chunks else None

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        receives = self._traffic[bwd_chunk_id].receives
        self._stage_meta.input_grads = tuple(_meta(t) if t.requires_grad else None for t in receives)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: gradients are reduced when the step has ended on all ranks, and only if it is to count."""


class BackwardFailed(Exception):
    """Raised by a stage's ``watch`` in place of an error in a backward pass that it has noted."""


def _meta(shape: TensorShape) -> Any:
    from torch.distributed.pipelining._utils import extract_tensor_meta

    empty = torch.empty(shape.shape, dtype=shape.dtype, device="meta")
    return extract_tensor_meta(empty.requires_grad_(shape.requires_grad))


def meet_neighbours(stages: Sequence[UserStage]) -> None:
    """Sends a number from stage to stage: some backends connect a pair of ranks when it first talks."""
    ops = [op for stage in stages for op in stage._get_init_p2p_neighbors_ops()]
    _wait_batch_p2p(_batch_p2p([op for op in ops if op.group_peer != stages[0].group_rank]))


def build_schedule(name: str, stages: list[UserStage], microbatches: int) -> Any:
    """Returns a torch schedule whose loss is the last stage's output and whose gradients are not scaled."""
    arguments = {"loss_fn": lambda output, target: output, "scale_grads": False}
    if name in _SINGLE:
        return SCHEDULES[name](stages[0], microbatches, **arguments)
    return SCHEDULES[name](stages, microbatches, **arguments)


def build_custom_schedule(orders: Orders, stages: list[UserStage], microbatches: int) -> Any:
    """Returns a torch schedule that runs the given actions."""
    schedule = _PipelineScheduleRuntime(stages, microbatches, loss_fn=lambda output, _: output, scale_grads=False)
    stage_to_rank = {stage: rank for rank, actions in orders.items() for stage, _, _ in actions}
    for stage in stages:
        stage.stage_index_to_group_rank = stage_to_rank
    table = {
        rank: [_Action.from_str(f"{stage}{kind}{micro}") for stage, kind, micro in actions]
        for rank, actions in orders.items()
    }
    schedule.pipeline_order = cast(Any, table)
    schedule._prepare_schedule_with_comms(cast(Any, table))
    return schedule


def run_schedule(schedule: Any, kwargs: list[dict[str, Any]], *, has_backward: bool) -> None:
    """Runs all micro-batches. Stages must be prepared: torch's own preparation, which runs the stages, is left out.

    Args:
        schedule: of ``build_schedule`` or ``build_custom_schedule``.
        kwargs: keyword arguments of the stages' programs, by micro-batch.
        has_backward: False for evaluation.
    """
    for name in ("_stage_forward_initialized", "_stages_forward_initialized"):
        if hasattr(schedule, name):
            setattr(schedule, name, True)
            setattr(schedule, name.replace("forward", "backward"), has_backward)
    schedule._has_backward = has_backward
    schedule._internal_losses.clear()
    if isinstance(schedule, PipelineScheduleMulti):
        runtime = cast(Any, schedule)
        runtime.fwd_recv_ops.clear()
        runtime.bwd_recv_ops.clear()
        for stage in schedule._stages:
            stage.stage_index_to_group_rank = schedule.stage_index_to_group_rank
    count = len(kwargs)
    target: list[Any] = [None] * count
    schedule._step_microbatches([()] * count, kwargs, target, None, return_outputs=False)


# ---- gradients of sharded stages


def begin_whole_gradients(root: FSDPModule) -> None:
    """Keeps parameters and gradients whole through all micro-batches of a step."""
    root.set_is_last_backward(False)
    root.set_reshard_after_forward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)


def reduce_whole_gradients(root: FSDPModule) -> None:
    """Reduces what the micro-batches have summed up and frees the whole parameters.

    The same as torch's ``PipelineStage.perform_reduce_grad``: backward passes of a schedule run by ``autograd.grad``
    as well, which calls none of fully_shard's hooks.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def drop_whole_gradients(root: nn.Module) -> None:
    """Forgets what the micro-batches have summed up."""
    for record in torch_dist_api.fsdp_parameters(root):
        torch_dist_api.drop_whole_gradient(record)


class Apart(torch.autograd.Function):
    """The same memory as the result of an operation of its own.

    For received tensors, which are leaves: blocks may change theirs in place. For tensors to be sent: torch detaches
    them in place after their backward, while others may have saved them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def to_be_sent(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor that nobody else holds."""
    return cast(Tensor, Apart.apply(tensor.contiguous()))
