"""What a user can say about tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_pardist.base.errors import message

Verify = Literal["probe", "full", "off"]


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """How the matrices inside a block are shared.

    Raises:
        ValueError: for a field with a value that it cannot have.
    """

    plan: Mapping[str, Any] | None = None
    """Module name pattern -> ``column``, ``row``, ``fused_column``, ``vocab``, ``replicate``, ``sequence``, or torch's
    ``ColwiseParallel``, ``RowwiseParallel`` or ``SequenceParallel``. Completes the plan that is derived from the
    module's own code, and counts before it. ``*`` stands for one part of a name."""
    verify: Verify = "probe"
    """``probe`` compares one region of each kind with the whole one before training, ``full`` the whole first step too
    (where the whole module fits beside the shares), ``off`` nothing."""
    sequence_parallel: bool = False
    """Keep what lies between the regions of a block (norms, dropout, residuals) sharded over the sequence."""
    loss_parallel: bool = True
    """Keep the logits of a head that is shared out over the vocabulary sharded through the cross entropy."""
    async_tensor_parallel: bool = False
    """Overlap the collectives of a region with its matrix products through symmetric memory."""

    def __post_init__(self) -> None:
        if self.verify not in get_args(Verify):
            self._refuse("verify", f"one of {', '.join(get_args(Verify))}")
        for name in ("sequence_parallel", "loss_parallel", "async_tensor_parallel"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")
        plan: object = self.plan
        if plan is not None and not isinstance(plan, Mapping):
            self._refuse("plan", "a mapping of module name patterns to words, such as {'blocks.*.mlp.up': 'column'}")
        if self.async_tensor_parallel:
            raise ValueError(
                message(
                    "Async tensor parallel replaces matrix products by fused kernels of torch's compiler on symmetric "
                    "memory; here the module's own eager code runs.",
                    got="async_tensor_parallel=True",
                    source="the strategy's TensorOptions",
                    change="leave it out; sequence_parallel=True lowers the memory of what lies between the regions",
                )
            )

    def _refuse(self, name: str, words: str) -> None:
        raise ValueError(
            message(
                f"TensorOptions.{name} must be {words}.",
                got=f"{name}={getattr(self, name)!r}",
                source="the strategy's arguments",
                change=f"set {name} to {words}",
            )
        )
