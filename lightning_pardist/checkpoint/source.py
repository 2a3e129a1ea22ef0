"""The face of anything that weights, or a whole run, can be loaded from: read these boxes of these tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.checkpoint.pieces import Entry, Piece

Info = tuple[tuple[int, ...], torch.dtype]


class Source(ABC):
    """Tensors under this package's keys (``model.<name>``, ``optim.<i>.<name>.<key>``), and what lies beside them."""

    whole_run = False
    """Whether a run can be resumed from it, or only its weights be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.infos: dict[str, Info] = {}
        self.aliases: dict[str, str] = {}

    @abstractmethod
    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        """Fills the pieces of the entries, which are listed under the source's keys."""

    def check_content(self, wanted: Mapping[str, Entry]) -> None:  # noqa: B027 - most kinds have no checksums
        """Compares what reading the entries would touch with checksums, where there are any."""

    def trainer(self, *, weights_only: bool) -> dict[str, Any]:
        """Returns loops, callbacks, schedulers, hyperparameters."""
        return {}

    def optimizers(self) -> list[dict[str, Any]]:
        """Returns per optimizer ``class``, ``groups``, ``values``: see ``Snapshot.optimizers``."""
        return []

    def module_objects(self) -> dict[str, Any]:
        """Returns what the module's ``state_dict`` held besides tensors."""
        return {}

    def read(self, key: str) -> Tensor:
        """Returns one whole tensor."""
        shape, dtype = self.infos[key]
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into({key: Entry(key, shape, dtype, [Piece((0,) * len(shape), tensor)])})
        return tensor
