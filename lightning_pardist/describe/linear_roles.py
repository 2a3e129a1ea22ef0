"""Which linear layers open, close or fuse tensor-parallel regions, from one run of the module on fake tensors."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pardist.base.errors import message
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.entries import Entry
from lightning_pardist.describe.profile import observe_step
from lightning_pardist.describe.roles_solve import solve
from lightning_pardist.describe.roles_trace import TraceRecorder
from lightning_pardist.specs.tensor_roles import TensorRoles


def derive_roles(
    module: nn.Module, batch: Any, *, entry: Entry = "training_step", device: torch.device | None = None
) -> TensorRoles:
    """Returns the role of every linear layer and embedding that one step uses, derived from the flow of data.

    A linear layer whose input is not sharded opens a region (column), one whose input is sharded along the features it
    contracts closes it (row). Where a region is not closed, or its sharded dim is mixed on the way (a norm over all
    heads, a softmax over features), the layers that opened it are replicated. See [Note: shard axes].

    Args:
        module: a LightningModule or any module, on any device, meta included. It stays as it is.
        batch: as for ``profile_model``.
        entry: what to run.
        device: as for ``profile_model``.

    Raises:
        ValueError: if the step cannot be run on fake tensors.
    """
    started = time.perf_counter()
    recorders: list[TraceRecorder] = []

    def observe(fake: nn.Module, fake_batch: Any) -> AbstractContextManager[object]:
        recorders.append(TraceRecorder(fake, fake_batch))
        return recorders[-1].watching(fake, outputs=entry == "forward")

    try:
        profile = observe_step(module, batch, observe, entry=entry, device=device)
    except Exception as error:
        if not recorders:  # the arguments were wrong: the message says so
            raise
        what = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            message(
                "A tensor-parallel plan is derived from one step on fake tensors, which must run to its end.",
                got=f"{type(error).__name__}: {what}",
                source=f"{type(module).__name__}.{entry}, at {blame(error)}",
                change="change that line so that it does not need a tensor's value, or give an explicit plan",
            )
        ) from error
    roles = solve(recorders[-1].trace, module, profile.stacks)
    return replace(roles, assumptions=profile.assumptions, seconds=time.perf_counter() - started)
