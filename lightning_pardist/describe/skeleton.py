"""A copy of a module without its weights, kept to foretell shapes while the module itself is cut and sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.base.batch_norm import is_batch_norm
from lightning_pardist.base.nested import map_leaves
from lightning_pardist.base.torch_api import FakeTensorMode, checkpoints_without_reentry
from lightning_pardist.describe.dataflow import AllSeen, FlowRecorder
from lightning_pardist.describe.entries import trainer_of
from lightning_pardist.describe.fake_copy import FakeCopier
from lightning_pardist.describe.profile import observe_step
from lightning_pardist.describe.sample import keep_rng_state
from lightning_pardist.specs.pipeline_plan import Dataflow, Outputs


class _WeightlessCopier(FakeCopier):
    """Copies parameters to the meta device; buffers and other tensors, whose values may decide things, are shared."""

    gather_dtype: torch.dtype | None = None

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        dtype = self.gather_dtype if self.gather_dtype is not None and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)


@dataclass(frozen=True)
class Step:
    """A step to foretell."""

    entry: str
    """Name of the module's method."""
    batch: Any
    further: tuple[Any, ...] = ()
    """Its other arguments."""
    is_transferred: bool = True
    """The batch has been through the module's transfer hooks."""


class Skeleton:
    """Foretells what steps of a module do."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        """Copies the module; to be done before it is changed.

        Args:
            module: the user's.
            device: on which it computes.
            autocast_dtype: of ``torch.autocast`` around steps, None for none.
            gather_dtype: in which shards are gathered and used, None for their own.
        """
        self._live = weakref.ref(module)  # as a strong one it would keep the module alive as long as its forecast
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._gather_dtype = gather_dtype
        copier = _WeightlessCopier(FakeTensorMode(), device)
        copier.gather_dtype = gather_dtype
        trainer = trainer_of(module)
        if trainer is not None:
            copier.stand_in(trainer, None)
        self._module: nn.Module = copier.copy(module)
        if gather_dtype is not None:
            _keep_batch_norms(module, self._module)
        self._parts = list(self._module.modules())
        self._own = dict(self._module.named_parameters())

    def dataflow(self, blocks: Sequence[str], step: Step) -> tuple[Dataflow, dict[int, Outputs]]:
        """Returns how values flow in a step, and what its blocks give back.

        Raises:
            Exception: whatever ended the run.
        """
        recorder = self._observe(blocks, step, only_outputs=False)
        return recorder.dataflow(), recorder.outputs

    def outputs(self, blocks: Sequence[str], step: Step) -> dict[int, Outputs]:
        """Returns what the blocks give back in a step; code after the last block is not run.

        Raises:
            Exception: whatever ended the run before.
        """
        return self._observe(blocks, step, only_outputs=True).outputs

    def _observe(self, blocks: Sequence[str], step: Step, *, only_outputs: bool) -> FlowRecorder:
        live = self._live()
        assert live is not None
        self._follow(live)
        trainer = trainer_of(live)
        recorders: list[FlowRecorder] = []

        def observe(fake: nn.Module, _batch: Any) -> AbstractContextManager[object]:
            recorder = FlowRecorder(fake, blocks, only_outputs=only_outputs)
            recorders.append(recorder)
            _run_entry(fake, step, recorder, self._autocast)
            self._cast_inputs(fake, blocks)
            return recorder.watching(fake)

        try:
            if trainer is not None:
                self._module.trainer = trainer
            with keep_rng_state(), checkpoints_without_reentry():
                observe_step(self._module, step.batch, observe, device=self._device)
        except AllSeen:
            pass
        finally:
            if trainer is not None:
                self._module.trainer = None  # type: ignore[assignment]  # the run's objects are not kept alive
            for recorder in recorders:
                recorder.release()
        return recorders[-1]

    def _cast_inputs(self, fake: nn.Module, blocks: Sequence[str]) -> None:
        """Casts what enters a block, as fully_shard does."""
        dtype = self._gather_dtype
        if dtype is None:
            return

        def cast(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_leaves(cast, args), map_leaves(cast, kwargs)

        for name in blocks:
            fake.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        # Without the cache: a weight cast in one block must not look as if another block read its insides.
        return torch.autocast(self._device.type, dtype=self._autocast_dtype, cache_enabled=False)

    def _follow(self, live_module: nn.Module) -> None:
        """Takes over what training changes: modes, trainability, plain numbers on modules."""
        for live, part in zip(live_module.modules(), self._parts, strict=True):
            for key, value in vars(live).items():
                if type(value) in (bool, int, float, str) and key in vars(part):
                    vars(part)[key] = value
        for name, parameter in live_module.named_parameters():
            if name in self._own:
                self._own[name].requires_grad_(parameter.requires_grad)


def _keep_batch_norms(module: nn.Module, skeleton: nn.Module) -> None:
    """Batch norms are gathered in their own dtype."""
    for live, part in zip(module.modules(), skeleton.modules(), strict=True):
        if is_batch_norm(live):
            for name, parameter in live.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device="meta")
                part.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _run_entry(
    fake: Any, step: Step, recorder: FlowRecorder, autocast: Callable[[], AbstractContextManager[object]]
) -> None:
    """Makes the fake module's ``training_step`` run the wanted method and tell what it returns and logs."""
    method = getattr(fake, step.entry)

    def training_step(batch: Any, batch_idx: int) -> None:
        with autocast():
            output = method(batch, *step.further)
        recorder.needed_after_all(output)
        recorder.finished = True

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        recorder.needed_after_all(value)

    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(values, nn.Module):
            recorder.needed_after_all(dict(values))

    replaced: dict[str, Any] = {"training_step": training_step, "log": log, "log_dict": log_dict}
    if step.is_transferred:
        replaced["on_before_batch_transfer"] = replaced["on_after_batch_transfer"] = lambda batch, _: batch
    for name, function in replaced.items():
        if hasattr(type(fake), name):
            object.__setattr__(fake, name, function)
