"""What a step costs with some blocks recomputed, or with parameters gathered in a lower dtype: one more fake run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.recomputing import Recomputation, recompute_block
from lightning_pardist.base.torch_api import OpOverload
from lightning_pardist.describe.entries import Entry
from lightning_pardist.describe.profile import profile_prepared
from lightning_pardist.describe.record import StepRecorder
from lightning_pardist.specs.model_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How the step runs."""

    recomputed: Sequence[str] = ()
    """Names of the blocks that are recomputed."""
    kept: Mapping[str, frozenset[OpOverload]] = field(default_factory=dict)
    """Word -> operators whose results a recomputed block keeps."""
    gather_dtype: torch.dtype | None = None
    """Dtype in which sharded parameters are gathered, and floating inputs enter the units; None: their own."""
    cast_inputs_of: Sequence[str] = ()
    """Names of the modules whose floating inputs are cast to ``gather_dtype``."""
    autocast_dtype: torch.dtype | None = None
    device: torch.device | None = None


def profile_under(
    module: nn.Module, batch: Any, conditions: Conditions, *, entry: Entry = "training_step"
) -> tuple[ModelProfile, frozenset[str]]:
    """Returns the profile of one step under ``conditions``, and those words of ``kept`` that stood for some result.

    Raises:
        Exception: whatever ended the run.
    """
    hits: set[str] = set()
    words = {operator: word for word, operators in conditions.kept.items() for operator in operators}

    def prepare(fake: nn.Module, recorder: StepRecorder) -> None:
        hits.clear()

        def note(operator: OpOverload, out: Any) -> None:
            hits.add(words[operator])
            for tensor in tensors_in(out):
                recorder.pack(tensor)

        how = Recomputation(kept=frozenset(words), note=note)
        for name in conditions.recomputed:
            recompute_block(fake.get_submodule(name), how)
        if conditions.gather_dtype is not None:
            for name in conditions.cast_inputs_of:
                fake.get_submodule(name).register_forward_pre_hook(
                    cast_inputs_to(conditions.gather_dtype), with_kwargs=True
                )

    profile = profile_prepared(
        module,
        batch,
        prepare,
        gather_dtype=conditions.gather_dtype,
        entry=entry,
        autocast_dtype=conditions.autocast_dtype,
        device=conditions.device,
    )
    return profile, frozenset(hits)


def cast_inputs_to(dtype: torch.dtype) -> Any:
    """Returns a hook before a module's forward that casts what enters it, as fully_shard does."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    return hook
