"""Checkpoints: one format for every layout, over torch.distributed.checkpoint. Knows nothing of Lightning."""

from __future__ import annotations

from lightning_pardist.checkpoint.exchange import CheckpointError, CorruptCheckpointError
from lightning_pardist.checkpoint.export import export
from lightning_pardist.checkpoint.kind import holds_optimizers
from lightning_pardist.checkpoint.load import LoadReport, LoadRequest, load_checkpoint, load_weights, read_rank_states
from lightning_pardist.checkpoint.save import SaveHandle, Saver, save_checkpoint
from lightning_pardist.checkpoint.select import complete_checkpoints, finish_interrupted, newest_complete
from lightning_pardist.checkpoint.state import TrainState, check_optimizers
from lightning_pardist.checkpoint.tools import Description, consolidate, inspect, verify
from lightning_pardist.checkpoint.write import SaveInfo

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "Description",
    "LoadReport",
    "LoadRequest",
    "SaveHandle",
    "SaveInfo",
    "Saver",
    "TrainState",
    "check_optimizers",
    "complete_checkpoints",
    "consolidate",
    "export",
    "finish_interrupted",
    "holds_optimizers",
    "inspect",
    "load_checkpoint",
    "load_weights",
    "newest_complete",
    "read_rank_states",
    "save_checkpoint",
    "verify",
]
