"""What the user chooses about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_pardist.base.errors import message

Format = Literal["sharded", "full"]
OnSaveError = Literal["raise", "warn"]
VerifyOnLoad = Literal["checksum", "size", "off"]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How checkpoints are written and checked."""

    async_save: bool = False
    """Copy to host memory, go on training, write behind. At most one save is in flight."""
    format: Format = "sharded"
    """``sharded``: a directory that any layout reads. ``full``: one ordinary Lightning ``.ckpt`` file."""
    on_save_error: OnSaveError = "raise"
    """``warn``: log on rank 0 and go on training; the previous checkpoint is untouched in both cases."""
    verify_on_load: VerifyOnLoad = "checksum"
    """``checksum``: check what a rank reads before anything is overwritten. ``size``: presence and sizes only."""
    storage_options: dict[str, Any] | None = None
    """Keyword arguments of the fsspec file system, for paths such as ``s3://bucket/run``."""
    timeout_s: float = 1800.0
    """Longest wait for another rank, in seconds. A rank that writes for longer counts as lost."""

    def __post_init__(self) -> None:
        for field, allowed in (("format", Format), ("on_save_error", OnSaveError), ("verify_on_load", VerifyOnLoad)):
            value = getattr(self, field)
            if value not in get_args(allowed):
                raise ValueError(
                    message(
                        f"CheckpointOptions.{field} must be one of {', '.join(map(repr, get_args(allowed)))}.",
                        got=repr(value),
                        source=f"CheckpointOptions(..., {field}={value!r})",
                        change="use one of the names above",
                    )
                )
        if not self.timeout_s > 0:
            raise ValueError(
                message(
                    "CheckpointOptions.timeout_s must be a positive number of seconds.",
                    got=repr(self.timeout_s),
                    source=f"CheckpointOptions(..., timeout_s={self.timeout_s!r})",
                    change="leave it out for 30 minutes, or give the longest time one rank may need to write",
                )
            )
