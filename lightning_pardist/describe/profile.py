"""The entrance of ``describe``: module and batch in, ``ModelProfile`` out."""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from lightning_pardist.describe.assemble import Assembler, block_runs
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.fake_copy import FakeCopier, lower_parameters
from lightning_pardist.describe.known_values import Fact, KnownValues
from lightning_pardist.describe.libraries import fakes_pass_for_real, libraries_ask_for_fakes
from lightning_pardist.describe.questions import Questions, UnknownNumber, UnknownValueError
from lightning_pardist.describe.record import StepRecorder, named_tensors
from lightning_pardist.describe.sample import keep_rng_state
from lightning_pardist.describe.stacks import candidate_blocks, find_stacks
from lightning_pardist.describe.stand_ins import give_services
from lightning_pardist.specs.model_profile import BETWEEN, PREFIX, SUFFIX, ModelProfile, PhaseCost

Entry = Literal["training_step", "forward"]
Observer = Callable[[nn.Module, Any], AbstractContextManager[object]]
Prepare = Callable[[nn.Module, StepRecorder], None]
"""Changes the fake module before its step."""
_LOST = "Known from the module tree only: block stacks and parameters. Lost: costs, phases, and what enters each block"


def profile_model(
    module: nn.Module,
    batch: Any,
    *,
    entry: Entry = "training_step",
    autocast_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> ModelProfile:
    """Returns what one step of ``module`` on ``batch`` does, found out by one run on fake tensors.

    Neither weights nor activations take memory, and module, batch and random state stay as they are. If the run cannot
    finish, the profile comes from the module tree and says why; a warning repeats it.

    Args:
        module: a LightningModule or any module, on any device, meta included.
        batch: what ``training_step`` gets; for ``entry="forward"`` a tuple of arguments, a mapping of keyword
            arguments, or the one argument (as ``example_input_array``).
        entry: what to run.
        autocast_dtype: dtype of ``torch.autocast`` around the forward pass, None for none.
        device: device the fake tensors are on, which decides the kernels that attention would use. It must exist here.
            None: that of the module's first parameter that is not on meta, else the CPU.

    Raises:
        ValueError: if the module has no method named by ``entry`` or lazy parameters, or if there is no such device.
    """
    started = time.perf_counter()
    _check(module, entry)
    device = device or _device_of(module)
    _check_device(device)
    try:
        with keep_rng_state():
            profile = _run(_Request(module, batch, entry, autocast_dtype, device))
    except Exception as error:
        reason = f"{_what(error)}; the run ended at {blame(error)}. {_LOST}."
        profile = module_tree_profile(module, reason)
        warnings.warn(f"{type(module).__name__} could not be run on fake tensors: {reason}", stacklevel=2)
    rows, tokens = _rows_and_tokens(batch)
    seconds = time.perf_counter() - started
    return replace(profile, batch_rows=rows, batch_tokens=tokens, entry=entry, seconds=seconds)


def observe_step(
    module: nn.Module,
    batch: Any,
    observe: Observer,
    *,
    entry: Entry = "training_step",
    device: torch.device | None = None,
) -> ModelProfile:
    """Returns the profile of one step on fake tensors that ``observe`` sees too; a run that fails raises.

    Args:
        module: as for ``profile_model``.
        batch: as for ``profile_model``.
        observe: given the fake module and the fake batch, returns the context that the step runs in, above every other
            mode. A run that has to be repeated asks for a new one.
        entry: what to run.
        device: as for ``profile_model``.

    Raises:
        Exception: whatever ended the run.
    """
    _check(module, entry)
    device = device or _device_of(module)
    _check_device(device)
    with keep_rng_state():
        return _run(_Request(module, batch, entry, None, device, observe))


def profile_prepared(
    module: nn.Module,
    batch: Any,
    prepare: Prepare,
    *,
    gather_dtype: torch.dtype | None = None,
    entry: Entry = "training_step",
    autocast_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> ModelProfile:
    """Returns the profile of one step of a fake module that was changed first; a run that fails raises.

    Args:
        module: as for ``profile_model``.
        batch: as for ``profile_model``.
        prepare: changes the fake copy in place.
        gather_dtype: dtype in which floating parameters are used, as under sharding with mixed precision; None: theirs.
        entry: what to run.
        autocast_dtype: as for ``profile_model``.
        device: as for ``profile_model``.
    """
    _check(module, entry)
    device = device or _device_of(module)
    _check_device(device)
    with keep_rng_state():
        request = _Request(
            module, batch, entry, autocast_dtype, device, observe=None, prepare=prepare, gather_dtype=gather_dtype
        )
        profile = _run(request)
    rows, tokens = _rows_and_tokens(batch)
    return replace(profile, batch_rows=rows, batch_tokens=tokens, entry=entry)


def module_tree_profile(module: nn.Module, reason: str | None = None) -> ModelProfile:
    """Returns what can be told without a run: parameters, ties, and the stacks that the module tree suggests.

    Args:
        module: the module.
        reason: why there was no run.
    """
    return _profile_of(module, None, reason or f"there was no batch to run the module on. {_LOST}.")


def _check(module: nn.Module, entry: Entry) -> None:
    if not callable(getattr(module, entry, None)):
        raise ValueError(
            message(
                f"describe runs the module's {entry}.",
                got=f"{type(module).__name__} without a method {entry}",
                source="the module and the argument `entry`",
                change='entry="forward" runs any module with its forward arguments as batch',
            )
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                message(
                    "A lazy module must be initialised before it is described: its parameters have no shape yet.",
                    got=f"{name} is an UninitializedParameter",
                    source=f"{type(module).__name__}",
                    change="run the module once on a batch (in configure_model or setup), or use the non-lazy class",
                )
            )


def _check_device(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)  # a fake tensor of a device that is not there would end the process
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            message(
                "Fake tensors can only be on a device that exists: torch asks it which kernels it has.",
                got=f"device {device}, and torch says: {str(error).splitlines()[0]}",
                source="the argument `device`",
                change="describe on the machine that has the device, or on device cpu",
            )
        ) from error


@dataclass(frozen=True)
class _Request:
    """What to run."""

    module: nn.Module
    batch: Any
    entry: Entry
    autocast_dtype: torch.dtype | None
    device: torch.device
    observe: Observer | None = None
    prepare: Prepare | None = None
    gather_dtype: torch.dtype | None = None


def _run(request: _Request) -> ModelProfile:
    if not libraries_ask_for_fakes():
        return _FakeRun(request).profile()
    try:
        with fakes_pass_for_real():
            return _FakeRun(request).profile()
    except Exception as error:
        # A path that looks at values is closed; the library's own path for tracing may still be open.
        run = _FakeRun(request)
        run.assume(f"transformers took its path for tracing: {_what(error)} at {blame(error)}")
        with suppress(Exception):
            return run.profile()
        raise


class _FakeRun:
    """One step on a fake copy."""

    def __init__(self, request: _Request) -> None:
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
        trainer = _trainer_of(module)
        if trainer is not None:
            copier.stand_in(trainer, None)
        for tensor in (*module.parameters(), *module.buffers()):
            copier.copy(tensor)
        self._module = copier.copy(module)
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
            # Of the original: a step may leave requires_grad of the copy's parameters toggled.
            profile = _profile_of(self._original, recorder, None)
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
            output = self._call()
        if self._entry == "training_step" and not getattr(self._module, "automatic_optimization", True):
            return  # it has called backward itself
        losses = _losses(output, only_loss=self._entry == "training_step")
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])

    def _call(self) -> Any:
        module, batch = self._module, self._batch
        if self._entry == "training_step":
            batch = _transferred(module, batch)
            takes_index = _takes_index(module.training_step)
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)
        if isinstance(batch, Mapping):
            return module(**batch)
        return module(*batch) if isinstance(batch, tuple) else module(batch)

    def _autocast(self) -> Any:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast_dtype)

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def assume(self, what: str) -> None:
        """Notes something that the run takes for granted."""
        self._assumptions[what] = None


def _profile_of(module: nn.Module, recorder: StepRecorder | None, reason: str | None) -> ModelProfile:
    stacks = find_stacks(module, None if recorder is None else block_runs(recorder))
    assembler = Assembler(module, recorder, stacks)
    costs = assembler.costs()
    buffers = {id(buffer): buffer for buffer in module.buffers()}
    return ModelProfile(
        module_class=type(module).__name__,
        source="module_tree" if recorder is None else "fake_run",
        fallback_reason=reason,
        parameters=assembler.parameters(),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()),
        stacks=assembler.stacks(),
        prefix=costs.get(PREFIX, PhaseCost()),
        between=costs.get(BETWEEN, PhaseCost()),
        suffix=costs.get(SUFFIX, PhaseCost()),
        called_modules=tuple(recorder.called_modules) if recorder else None,
    )


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))


def _trainer_of(module: nn.Module) -> Any | None:
    try:
        return getattr(module, "trainer", None)
    except RuntimeError:  # Lightning's way of saying that there is none
        return None


def _transferred(module: Any, batch: Any) -> Any:
    """Returns the batch after the module's own hooks around the move to the device."""
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if callable(getattr(module, hook, None)):
            batch = getattr(module, hook)(batch, 0)
    return batch


def _takes_index(training_step: Any) -> bool:
    parameters = [
        parameter
        for parameter in inspect.signature(training_step).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _losses(output: Any, *, only_loss: bool) -> list[torch.Tensor]:
    """Returns the tensors that backward starts from: the loss, or every output when a forward has none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if only_loss and isinstance(output, torch.Tensor):
        loss = output
    if isinstance(loss, torch.Tensor):
        candidates = [loss]
    elif only_loss:
        candidates = []
    else:
        candidates = [tensor for _, tensor in named_tensors(output)]
    return [tensor for tensor in candidates if tensor.requires_grad]


def _rows_and_tokens(batch: Any) -> tuple[int | None, int | None]:
    tensors = [tensor for _, tensor in named_tensors(batch)]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim() > 0), None)
    integers = next((tensor for tensor in tensors if not tensor.dtype.is_floating_point), None)
    tokens = integers.numel() if integers is not None and integers.dim() == 2 else None
    return rows, tokens


def _what(error: Exception) -> str:
    """Returns in one line what went wrong, in words where torch's own are about its insides."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of a result depends on values that only a real run knows ({text})"
    if isinstance(error, DataDependentOutputException):
        return f"the code decides by a value that only a real run knows ({text})"
    if isinstance(error, UnknownValueError):
        return text
    if isinstance(error, TypeError) and UnknownNumber.__name__ in text:
        return f"the code needs an integer read from a tensor, which only a real run knows ({text})"
    return f"{type(error).__name__}: {text}"


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
