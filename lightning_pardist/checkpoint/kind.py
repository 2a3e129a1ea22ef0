"""What can be done with a checkpoint, before it is loaded."""

from __future__ import annotations

from lightning_pardist.checkpoint.sources import open_source
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.specs.checkpoint_options import CheckpointOptions


def holds_optimizers(path: str, options: CheckpointOptions, *, weights_only: bool = True) -> bool:
    """Returns True if a run can be resumed from it, False if it holds weights only. One process suffices.

    Raises:
        FileNotFoundError, ValueError, CorruptCheckpointError: as ``load_checkpoint``.
    """
    storage, target = open_storage(path, options.storage_options)
    source = open_source(storage, target, verify=options.verify_on_load, weights_only=weights_only)
    return source.whole_run and bool(source.optimizers())
