"""One step of a module on a fake copy of it: no memory, no weights, every operator seen by a ``StepRecorder``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.torch_api import FakeTensorMode
from lightning_pardist.describe.assemble import assemble_profile
from lightning_pardist.describe.entries import Entry, call_entry, losses_of, trainer_of
from lightning_pardist.describe.fake_copy import FakeCopier, lower_parameters
from lightning_pardist.describe.known_values import Fact, KnownValues
from lightning_pardist.describe.questions import Questions
from lightning_pardist.describe.record import StepRecorder
from lightning_pardist.describe.stacks import candidate_blocks
from lightning_pardist.describe.stand_ins import give_services
from lightning_pardist.specs.model_profile import ModelProfile

Observer = Callable[[nn.Module, Any], AbstractContextManager[object]]
Prepare = Callable[[nn.Module, StepRecorder], None]
"""Changes the fake module before its step."""
Reshape = Callable[[nn.Module], None]
"""Gives the fake module other parameters, before anybody knows them."""


@dataclass(frozen=True)
class FakeRunRequest:
    """What to run."""

    module: nn.Module
    batch: Any
    entry: Entry
    autocast_dtype: torch.dtype | None
    device: torch.device
    observe: Observer | None = None
    prepare: Prepare | None = None
    gather_dtype: torch.dtype | None = None
    reshape: Reshape | None = None


class FakeRun:
    """One step on a fake copy."""

    def __init__(self, request: FakeRunRequest) -> None:
        module = self._original = request.module
        self._entry = request.entry
        self._autocast_dtype = request.autocast_dtype
        self._device = request.device
        self._observe = request.observe
        self._prepare = request.prepare
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._assumptions: dict[str, None] = {}
        self._known = KnownValues(self._mode, self.assume)
        copier = FakeCopier(self._mode, self._device)
        trainer = trainer_of(module)
        if trainer is not None:
            copier.stand_in(trainer, None)
        for tensor in (*module.parameters(), *module.buffers()):
            copier.copy(tensor)
        self._module = copier.copy(module)
        if request.reshape is not None:
            request.reshape(self._module)
        if request.gather_dtype is not None:
            lower_parameters(self._module, request.gather_dtype)
        self._batch = copier.copy(request.batch)
        give_services(self._module, trainer, self._backward, self.assume)
        for fake, original in copier.pairs():
            if not isinstance(original, nn.Parameter) and not original.is_meta:
                self._known.declare(fake, Fact(original.detach()))

    def profile(self) -> ModelProfile:
        """Returns what the step did."""
        candidates = candidate_blocks(self._module)
        recorder = StepRecorder(self._module, self._batch, self._known)
        recorder.watch(self._module, candidates)
        if self._prepare is not None:
            self._prepare(self._module, recorder)
        try:
            with self._modes(recorder):
                self._step()
            profile = assemble_profile(self._original, recorder, None)
        finally:
            recorder.release()
            self._known.forget_all()
        return replace(profile, assumptions=tuple(self._assumptions))

    @contextmanager
    def _modes(self, recorder: StepRecorder) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_quiet_fake_tensor_log())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack))
            stack.enter_context(self._mode)
            stack.enter_context(recorder)
            stack.enter_context(Questions(self._known, self.assume))
            if self._observe is not None:
                stack.enter_context(self._observe(self._module, self._batch))
            yield

    def _step(self) -> None:
        with self._autocast():
            output = call_entry(self._module, self._batch, self._entry)
        if self._entry == "training_step" and not getattr(self._module, "automatic_optimization", True):
            return  # it has called backward itself
        losses = losses_of(output, only_loss=self._entry == "training_step")
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])

    def _autocast(self) -> Any:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def assume(self, what: str) -> None:
        """Notes something that the run takes for granted."""
        self._assumptions[what] = None


@contextmanager
def _quiet_fake_tensor_log() -> Iterator[None]:
    # It prints a traceback of its own before it raises; the error is reported by us, in one line.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
