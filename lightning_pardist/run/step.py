"""Runs the user's methods and backward passes on a spread module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_pardist import torch_dist_api
from lightning_pardist.parallel_model import ROOT_CALL, ParallelModel
from lightning_pardist.run.reduce import average_gradients, average_scalars
from lightning_pardist.run.tensor_gradients import PartialGradients
from lightning_pardist.run.tensor_mode import TensorMode
from lightning_pardist.run.unused import GradientUse

_T = TypeVar("_T")


# torch 2.13 renamed the switch and warns about the old name.
_NO_BUFFER_SYNC: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


class _Entry(nn.Module):
    """What DistributedDataParallel wraps: the user's module, entered through any function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[[], _T]) -> _T:
        with torch_dist_api.outside_reducer():
            return fn()


class StepRunner:
    """Runs steps of one spread module. See [Note: one root call]."""

    def __init__(self, model: ParallelModel, *, manual_optimization: bool = False) -> None:
        self._model = model
        self._manual = manual_optimization
        self._sync = True
        self._inside_step = False
        self._pending = False
        self._trainable = self._trainability()
        looks_for_unused = model.kind == "shard" and model.plan.data_parallel.find_unused_parameters
        self._use = GradientUse(model) if looks_for_unused else None
        # Manual steps run several backward passes over parts of the module: zeros for the other parts would cost much.
        self._reduces_unused = torch_dist_api.CAN_REDUCE_UNUSED and (looks_for_unused or not manual_optimization)
        self._reduce_unused(self._reduces_unused)
        has_tensor_axis = model.plan.tensor is not None
        if has_tensor_axis and model.tensor_mode is None:
            model.tensor_mode = TensorMode(model)  # once: its hooks stay on the module from one entry to the next
        self._tensor = model.tensor_mode
        self._partial = PartialGradients(model) if has_tensor_axis else None

    @property
    def window_ends(self) -> bool:
        """False for a micro-batch that is not the last of its accumulation window."""
        return self._sync

    def forward(self, fn: Callable[[], _T]) -> _T:
        """Returns ``fn()``, run with parameters gathered and gradients to be reduced as the plan says."""
        model = self._model
        if self._tensor is not None:
            fn = partial(self._tensor.run, fn)
        if model.kind == "none":
            with self._shards_shown():
                return fn()
        if torch.is_grad_enabled():
            self._follow_trainability()
        if model.kind == "replicate":
            with self._shards_shown():
                return self._forward_replicated(fn)
        self._inside_step = True
        try:
            with model.shown():
                return cast(_T, getattr(model.module, ROOT_CALL)(fn))
        except BaseException:
            self._abandon()
            raise
        finally:
            self._inside_step = False
            if self._manual:
                # Optimizers ran inside the step; whole copies made before them must not be seen again.
                self.free_gathered()

    @contextmanager
    def _shards_shown(self) -> Iterator[None]:
        """Lets the user's code see plain tensors where fully_shard does not see to it."""
        outer = self._inside_step
        with self._model.shown():
            self._inside_step = outer or bool(self._model.shards)
            try:
                yield
            finally:
                self._inside_step = outer

    def loss_to_backward(self, loss: Tensor) -> Tensor:
        """Returns the loss with the root's backward hooks attached.

        A loss returned by the step has them already. Under manual optimization it never left the step, and without the
        hooks nobody would end the root's backward.
        """
        if self._use is not None:
            self._use.before_backward()
        for held in self._model.shards:
            held.take_gradient()  # here, for Lightning sets gradients to None between step and backward
        if self._partial is not None:
            self._partial.before_backward()
        if self._manual and self._model.kind == "shard":
            return cast(Tensor, getattr(self._model.module, ROOT_CALL)(lambda: loss))
        return loss

    def backward(self) -> AbstractContextManager[None]:
        """Returns the context of a backward pass: what is recomputed finds what it found in the forward pass."""
        return self._model.shown()

    def after_backward(self) -> None:
        """Finishes the gradients of a backward pass and, inside a manual step, makes the root usable again."""
        model = self._model
        self._pending = not self._sync
        if model.kind == "replicate" and self._manual and self._sync:
            average_gradients(model, agree=True)
        for shard in model.shards:
            shard.publish_gradient()
        if model.kind == "shard" and self._sync:
            average_scalars(model)
            if self._use is not None:
                self._use.end_window()
        if self._partial is not None and self._sync:
            self._partial.end_window()
        if self._inside_step:
            self._gather_root()

    def after_optimizer_step(self) -> None:
        """Drops whole copies of parameters that an optimizer inside a manual step has just changed."""
        if self._inside_step:
            self.free_gathered()
            self._gather_root()

    def follow_toggle(self) -> None:
        """Notices inside a manual step that ``requires_grad`` changed, for what the user's code sees of parameters."""
        if self._inside_step:
            for held in self._model.shards:
                held.local.requires_grad_(held.stored.requires_grad)
        if self._inside_step and self._model.kind == "shard":
            torch_dist_api.refresh_trainability(self._model.module)

    def skip_backward(self) -> None:
        """Ends a step whose loss all ranks agreed to drop; reduces gradients of earlier micro-batches if due."""
        model = self._model
        flush = self._sync and self._pending
        self._pending = self._pending and not self._sync
        if model.kind == "shard":
            self._backward_of_nothing(reduce_partial_sums=flush and model.plan.sizes.data_parallel_replicate > 1)
            if flush:
                average_scalars(model)
                if self._use is not None:
                    self._use.end_window()
        elif model.kind == "replicate" and flush:
            average_gradients(model, agree=False)
        if flush and self._partial is not None:
            self._partial.end_window()

    def _backward_of_nothing(self, *, reduce_partial_sums: bool) -> None:
        """Lets torch's final callback free what is gathered and reduce the whole gradients that have accumulated.

        Between hybrid replicas, partial sums of shards wait too; torch picks them up with the next gradient only, so
        every parameter then gives a gradient of zeros.
        """
        root = cast(FSDPModule, self._model.module)
        nothing = torch.zeros((), device=model_device(self._model), requires_grad=True)
        self._reduce_unused(reduce_partial_sums)
        try:
            getattr(root, ROOT_CALL)(lambda: nothing * 1).backward()
        finally:
            self._reduce_unused(self._reduces_unused)

    def _reduce_unused(self, enable: bool) -> None:
        if self._model.kind == "shard":
            torch_dist_api.reduce_unused_parameters(cast(FSDPModule, self._model.module), enable=enable)

    def free_gathered(self) -> None:
        """Frees every gathered parameter, so that the next forward sees what optimizers and callbacks have written."""
        if self._model.kind != "shard":
            return
        for module in self._model.module.modules():
            if isinstance(module, FSDPModule) and torch_dist_api.is_gathered(module):
                module.reshard()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Marks a micro-batch that is not the last of its window.

        ZeRO-0 and ZeRO-1 keep whole gradients and reduce once per window. ZeRO-2 and ZeRO-3 must keep gradients
        sharded, so they reduce-scatter every micro-batch; only the all-reduce between replicas waits.
        """
        self._sync = False
        try:
            if self._model.kind == "replicate" and self._model.reducer is not None:
                with self._model.reducer.no_sync():
                    yield
            elif self._model.kind == "shard":
                with self._deferring():
                    yield
            else:
                yield
        finally:
            self._sync = True

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        root = cast(FSDPModule, self._model.module)
        keep_whole = self._model.plan.data_parallel.zero_stage == 1
        if keep_whole:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)
        else:
            root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.set_requires_all_reduce(True)

    def _forward_replicated(self, fn: Callable[[], _T]) -> _T:
        if not torch.is_grad_enabled():
            return fn()
        if self._manual:
            # Several backward passes per step: gradients are averaged after each of them instead.
            return fn()
        if self._model.reducer is None:
            self._model.reducer = self._new_reducer()
            if not self._sync:
                with self._model.reducer.no_sync():
                    return cast(_T, self._model.reducer(fn))
        return cast(_T, self._model.reducer(fn))

    def _new_reducer(self) -> DistributedDataParallel:
        model = self._model
        assert model.meshes is not None
        plan = model.plan.data_parallel
        entry = _Entry(model.module)
        torch_dist_api.ignore_in_reducer(entry, [f"module.{name}" for name in plan.ignored_parameters])
        device = model_device(model)
        return DistributedDataParallel(
            entry,
            device_ids=None if device.type == "cpu" else [device],
            process_group=model.meshes.data_parallel_group,
            find_unused_parameters=plan.find_unused_parameters,
            gradient_as_bucket_view=True,
            # Weights were made equal at set-up; buffers are averaged where they are used, before evaluation and saves.
            init_sync=False,
            **_NO_BUFFER_SYNC,
        )

    def _gather_root(self) -> None:
        if self._model.kind == "shard":
            cast(FSDPModule, self._model.module).unshard()

    def _abandon(self) -> None:
        reset = getattr(self._model.module, "reset_iter_state", None)  # torch >= 2.13
        if reset is not None:
            reset()

    def _follow_trainability(self) -> None:
        """Notices parameters that were frozen or unfrozen since the last step, as finetuning callbacks do."""
        for held in self._model.shards:
            held.local.requires_grad_(held.stored.requires_grad)
        now = self._trainability()
        if now == self._trainable:
            return
        self._trainable = now
        if self._model.kind == "shard":
            torch_dist_api.refresh_trainability(self._model.module)
        else:
            self._model.reducer = None

    def _trainability(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self._model.module.parameters())


def model_device(model: ParallelModel) -> torch.device:
    """Returns the device on which the model computes, also when its state is offloaded."""
    assert model.meshes is not None
    device_type = model.meshes.world.device_type
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
