"""Host copies of what a rank writes, so that training may go on while they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pardist.checkpoint.pieces import Entry
from lightning_pardist.checkpoint.plan import Assignment


class HostBuffers:
    """Copies kept from save to save: fresh memory costs more than the copy itself, and pinned memory far more."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, entries: Sequence[Entry], assignment: Assignment) -> dict[tuple[int, int], Tensor]:
        """Returns the assigned pieces as host tensors that the next training step does not change.

        Valid until the next call. Buffers of pieces that are no longer assigned are given up.
        """
        copies: dict[tuple[int, int], Tensor] = {}
        kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        devices = set()
        for entry, piece in assignment:
            source = entries[entry].pieces[piece]
            key = (entries[entry].name, source.offset)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.view.shape or buffer.dtype != source.view.dtype:
                # Views carry strides of their storage; the copy is dense.
                buffer = torch.empty(source.view.shape, dtype=source.view.dtype, pin_memory=torch.cuda.is_available())
            buffer.copy_(source.view, non_blocking=True)
            if source.view.device.type != "cpu":
                devices.add(source.view.device)
            kept[key] = copies[entry, piece] = buffer
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        self._buffers = kept
        return copies


def live(entries: Sequence[Entry], assignment: Assignment) -> dict[tuple[int, int], Tensor]:
    """Returns the assigned pieces themselves, for a save that training waits for."""
    return {(entry, piece): entries[entry].pieces[piece].view for entry, piece in assignment}
