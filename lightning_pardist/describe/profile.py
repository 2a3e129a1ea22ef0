"""The entrance of ``describe``: module and batch in, ``ModelProfile`` out."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.base.torch_api import DataDependentOutputException, DynamicOutputShapeException
from lightning_pardist.describe.assemble import assemble_profile
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.entries import Entry
from lightning_pardist.describe.fake_run import FakeRun, FakeRunRequest, Observer, Prepare, Reshape
from lightning_pardist.describe.libraries import fakes_pass_for_real, libraries_ask_for_fakes
from lightning_pardist.describe.named_tensors import named_tensors
from lightning_pardist.describe.questions import UnknownNumber, UnknownValueError
from lightning_pardist.describe.sample import keep_rng_state
from lightning_pardist.specs.model_profile import ModelProfile

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
            profile = _run(FakeRunRequest(module, batch, entry, autocast_dtype, device))
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
        return _run(FakeRunRequest(module, batch, entry, None, device, observe))


def profile_prepared(
    module: nn.Module,
    batch: Any,
    prepare: Prepare,
    *,
    reshape: Reshape | None = None,
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
        reshape: gives it other parameters before that.
        gather_dtype: dtype in which floating parameters are used, as under sharding with mixed precision; None: theirs.
        entry: what to run.
        autocast_dtype: as for ``profile_model``.
        device: as for ``profile_model``.
    """
    _check(module, entry)
    device = device or _device_of(module)
    _check_device(device)
    with keep_rng_state():
        request = FakeRunRequest(
            module, batch, entry, autocast_dtype, device, observe=None, prepare=prepare, gather_dtype=gather_dtype,
            reshape=reshape,
        )  # fmt: skip
        profile = _run(request)
    rows, tokens = _rows_and_tokens(batch)
    return replace(profile, batch_rows=rows, batch_tokens=tokens, entry=entry)


def module_tree_profile(module: nn.Module, reason: str | None = None) -> ModelProfile:
    """Returns what can be told without a run: parameters, ties, and the stacks that the module tree suggests.

    Args:
        module: the module.
        reason: why there was no run.
    """
    return assemble_profile(module, None, reason or f"there was no batch to run the module on. {_LOST}.")


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


def _run(request: FakeRunRequest) -> ModelProfile:
    if not libraries_ask_for_fakes():
        return FakeRun(request).profile()
    try:
        with fakes_pass_for_real():
            return FakeRun(request).profile()
    except Exception as error:
        # A path that looks at values is closed; the library's own path for tracing may still be open.
        run = FakeRun(request)
        run.assume(f"transformers took its path for tracing: {_what(error)} at {blame(error)}")
        with suppress(Exception):
            return run.profile()
        raise


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))


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
