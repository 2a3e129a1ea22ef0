"""What one file of ``torch.save`` holds: a Lightning checkpoint, or a bare state dict."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.checkpoint import objects
from lightning_pardist.checkpoint.exchange import CorruptCheckpointError
from lightning_pardist.checkpoint.full import OURS
from lightning_pardist.checkpoint.names import without_wrappers
from lightning_pardist.checkpoint.pieces import Entry, Piece
from lightning_pardist.checkpoint.source import Source
from lightning_pardist.checkpoint.state import MODEL, OPTIMIZER
from lightning_pardist.checkpoint.storage import LocalStorage, Storage


class FileSource(Source):
    """One ``torch.save`` file: a Lightning ``.ckpt`` (ours in the full format included), or a bare state dict.

    The file is mapped into memory, so a rank touches only the boxes it reads.
    """

    def __init__(self, storage: Storage, path: str, *, weights_only: bool, live: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(path)
        self._checkpoint = _load_file(storage, path, weights_only=weights_only)
        self.whole_run = "optimizer_states" in self._checkpoint
        state = self._checkpoint.get("state_dict", self._checkpoint)
        self._tensors: dict[str, Tensor] = {}
        self._module_objects: dict[str, Any] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                self._tensors[MODEL + without_wrappers(name)] = value
            elif "state_dict" in self._checkpoint:
                self._module_objects[without_wrappers(name)] = value
        self._optimizers = [self._optimizer(i, saved, live) for i, saved in enumerate(self._saved_optimizers())]
        self.infos = {key: (tuple(value.shape), value.dtype) for key, value in self._tensors.items()}

    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        with torch.no_grad():
            for key, entry in wanted.items():
                for piece in entry.pieces:
                    piece.view.copy_(_box(self._tensors[key], piece))

    def trainer(self, *, weights_only: bool) -> dict[str, Any]:
        apart = {"state_dict", "optimizer_states", OURS}
        return {k: v for k, v in self._checkpoint.items() if k not in apart} if self.whole_run else {}

    def optimizers(self) -> list[dict[str, Any]]:
        return self._optimizers

    def module_objects(self) -> dict[str, Any]:
        return self._module_objects

    def _saved_optimizers(self) -> list[dict[str, Any]]:
        return self._checkpoint.get("optimizer_states", []) if self.whole_run else []

    def _optimizer(self, index: int, saved: Mapping[str, Any], live: Sequence[Sequence[str]]) -> dict[str, Any]:
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        ours = self._checkpoint.get(OURS, {})
        ordered = ours["parameter_names"][index] if ours else (live[index] if index < len(live) else [])
        names = dict(zip(ids, ordered)) if len(ids) == len(ordered) else {i: f"number {i}" for i in ids}
        values: dict[str, dict[str, Any]] = {}
        for i, state in saved["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._tensors[f"{OPTIMIZER}{index}.{names[i]}.{key}"] = value
                else:
                    values.setdefault(names[i], {})[key] = value
        groups = [
            {"params": [names[i] for i in g["params"]], "options": {k: v for k, v in g.items() if k != "params"}}
            for g in saved["param_groups"]
        ]
        return {"class": ours["classes"][index] if ours else "unknown", "groups": groups, "values": values}


def _load_file(storage: Storage, path: str, *, weights_only: bool) -> dict[str, Any]:
    try:
        if isinstance(storage, LocalStorage):
            try:
                loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            except RuntimeError as error:  # files of before torch 1.6 have no zip to map
                if zipfile.is_zipfile(path):
                    raise
                del error
                loaded = torch.load(path, map_location="cpu", weights_only=weights_only)
        else:
            with storage.open(path, "rb") as file:
                loaded = torch.load(file, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        with storage.open(path, "rb") as file:
            pickled = objects.unsafe_keys(file) if weights_only and zipfile.is_zipfile(file) else []
        if pickled:
            raise ValueError(objects.refusal(path, pickled)) from error
        raise CorruptCheckpointError(objects.unreadable(path, error)) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise CorruptCheckpointError(objects.unreadable(path, error)) from error
    if not isinstance(loaded, dict):
        raise CorruptCheckpointError(objects.unreadable(path, TypeError(f"it holds a {type(loaded).__name__}")))
    return loaded


def _box(tensor: Tensor, piece: Piece) -> Tensor:
    for dim, (start, length) in enumerate(zip(piece.offset, piece.view.shape)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
