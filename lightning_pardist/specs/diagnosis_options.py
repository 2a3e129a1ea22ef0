"""What a run watches so that a rank that is missing, different or stuck is named."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pardist.base.errors import message


@dataclass(frozen=True, kw_only=True)
class DiagnosisOptions:
    """How long ranks wait for each other, and what they compare."""

    start_timeout_s: float = 600.0
    """Longest wait for all ranks to come, before the process group is made; then the missing ranks are named."""
    stuck_after_s: float | None = None
    """A rank that makes no progress inside a step for so long says where it is. None: 9/10 of the strategy's timeout,
    so just before a collective fails."""
    compare_steps: bool = False
    """Debug mode: before every training step, compare step, batch and number of collectives over the ranks."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_s", "stuck_after_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    message(
                        f"DiagnosisOptions.{name} must be a positive number of seconds.",
                        got=f"{name}={value!r}",
                        source="DiagnosisOptions(...)",
                        change="leave it out for the default",
                    )
                )
