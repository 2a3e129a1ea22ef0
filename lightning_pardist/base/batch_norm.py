"""Which modules keep running statistics over a batch."""

from __future__ import annotations

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_batch_norm(module: nn.Module) -> bool:
    """Returns True for torch's batch norms, their lazy forms and their subclasses."""
    return isinstance(module, BATCH_NORMS)


def is_synchronised(module: nn.Module) -> bool:
    """Returns True for a batch norm whose statistics are those of all ranks already."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "process_group", None) is not None
