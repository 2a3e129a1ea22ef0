"""What the zoo finds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """One model on one layout."""

    kind: str
    """``equal``, ``refused``, ``not sharded`` or ``wrong``."""
    error: float = 0.0
    """Largest relative difference."""
    details: str = ""
    reason: str = ""
    how: str = ""
    """If not at first sight equal: under which condition it is."""
    first_error: float = 0.0
    """At first sight."""
    differs: int = 0
    """How many numbers or tensors differ."""
    seconds: float = 0.0
    trace: str = ""


@dataclass
class Row:
    """One model."""

    name: str
    parameters: int = 0
    attempt: int | None = None
    """Which way of making its config small worked."""
    unusable: str = ""
    """Why there is nothing to compare with: it does not run in one process."""
    layouts: dict[str, Verdict] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the row for a terminal."""
        if self.unusable:
            return f"{self.name:45s} not usable: {self.unusable[:150]}"
        words = []
        for layout, v in self.layouts.items():
            text = f"{layout} {v.kind}"
            text += f" {v.error:.0e}" if v.kind == "equal" else ""
            text += f" [{v.how}, else {v.first_error:.0e}]" if v.how else ""
            text += f" {v.reason[:160]!r}" if v.kind in ("wrong", "refused") else f" ({v.details})"
            words.append(f"{text} {v.seconds:.0f}s")
        return f"{self.name:45s} " + " | ".join(words)
