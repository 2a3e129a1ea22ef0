"""Weights in the safetensors format: one file, or a Hugging Face folder."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping

import torch

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.exchange import CorruptCheckpointError
from lightning_pardist.checkpoint.pieces import Entry
from lightning_pardist.checkpoint.source import Source
from lightning_pardist.checkpoint.state import MODEL


class SafetensorsSource(Source):
    """A ``.safetensors`` file, or a Hugging Face folder with one or several and an index."""

    def __init__(self, path: str, prefix: str | None = "", names: Collection[str] = ()) -> None:
        super().__init__(path)
        from safetensors import safe_open

        self._files = {file: safe_open(file, framework="pt", device="cpu") for file in _safetensors_files(path)}
        if prefix is None:
            prefix = _best_prefix([name for opened in self._files.values() for name in opened.keys()], names)  # noqa: SIM118
        self._keys: dict[str, tuple[str, str]] = {}
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                piece = opened.get_slice(name)
                self._keys[f"{MODEL}{prefix}{name}"] = (file, name)
                self.infos[f"{MODEL}{prefix}{name}"] = (tuple(piece.get_shape()), _DTYPES[piece.get_dtype()])

    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        with torch.no_grad():
            for key, entry in wanted.items():
                file, name = self._keys[key]
                for piece in entry.pieces:
                    if piece.view.dim() == 0:
                        piece.view.copy_(self._files[file].get_tensor(name))
                    elif piece.view.numel():
                        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.view.shape))
                        piece.view.copy_(self._files[file].get_slice(name)[box])


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The safetensors format's words for dtypes."""


def _safetensors_files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    indices = [name for name in os.listdir(path) if name.endswith(".safetensors.index.json")]
    if indices:
        with open(os.path.join(path, indices[0]), encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    for name in names:
        if not os.path.isfile(os.path.join(path, name)):
            raise CorruptCheckpointError(
                message(
                    "Every file that the index of a safetensors folder names must be there.",
                    got=f"{name} is missing",
                    source=os.path.join(path, indices[0]),
                    change="fetch the folder again",
                )
            )
        yield os.path.join(path, name)


def _best_prefix(stored: Collection[str], names: Collection[str]) -> str:
    """Returns what to put before the stored names so that most of them are the module's; the shortest if several do."""
    known = set(names)
    candidates = {"".join(f"{part}." for part in name.split(".")[:depth]) for name in known for depth in range(4)}
    return max(
        sorted(candidates, key=len), key=lambda prefix: sum(prefix + name in known for name in stored), default=""
    )
