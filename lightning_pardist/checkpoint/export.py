"""Weights out: a safetensors folder as Hugging Face reads it, written tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.source import Info, Source
from lightning_pardist.checkpoint.state import MODEL
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.checkpoint.tools import nbytes_of, open_for_reading, progress_bar

EXPORT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The safetensors format's words for dtypes."""


def export(
    source: str,
    destination: str,
    *,
    dtype: str | None = None,
    prefix: str = "",
    max_shard_bytes: int = 5 * 10**9,
    storage_options: dict[str, Any] | None = None,
    progress: bool = False,
) -> list[str]:
    """Writes the weights as a safetensors folder as Hugging Face reads it; returns the files' names.

    Tied tensors are written once, under their first name. Memory: the largest tensor, not the model.

    Args:
        source: a checkpoint of any kind.
        destination: a local folder; may exist, but not hold ``.safetensors`` files.
        dtype: ``fp32``, ``bf16`` or ``fp16`` for floating tensors; None keeps each one's.
        prefix: only names that start so are written, without it: ``"model."`` for ``self.model = AutoModel...``.
        max_shard_bytes: a file is at most so large, single tensors aside.
        storage_options: for ``source``.
        progress: show a bar.

    Raises:
        ValueError: if no name starts with ``prefix``, or weights lie at ``destination``.
    """
    opened = open_for_reading(source, storage_options, weights_only=True, need_objects=False)
    wanted = _export_plan(opened, dtype, prefix)
    _check_export_folder(destination)
    os.makedirs(destination, exist_ok=True)
    shards: list[dict[str, tuple[str, Info]]] = [{}]
    for name, (key, info) in wanted.items():
        filled = sum(nbytes_of(other) for _, other in shards[-1].values())
        if shards[-1] and filled + nbytes_of(info) > max_shard_bytes:
            shards.append({})
        shards[-1][name] = key, info
    names = [_shard_name(index, len(shards)) for index in range(len(shards))]
    total = sum(nbytes_of(info) for _, info in wanted.values())
    with progress_bar("export", total, progress) as bar:
        for name, shard in zip(names, shards):
            for written in _write_safetensors(os.path.join(destination, name), opened, shard):
                bar.update(written)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        names.append("model.safetensors.index.json")
        storage, folder = open_storage(destination)
        storage.write(storage.join(folder, names[-1]), json.dumps(index, indent=2).encode())
    return names


def _export_plan(source: Source, dtype: str | None, prefix: str) -> dict[str, tuple[str, Info]]:
    """Returns ``{name in the file: (key in the source, shape and dtype in the file)}``."""
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ValueError(
            message(
                f"The dtype of an export is one of {', '.join(EXPORT_DTYPES)}.",
                got=repr(dtype),
                source="dtype",
                change="use one of these, or leave it out to keep each tensor's own",
            )
        )
    out: dict[str, tuple[str, Info]] = {}
    for key, (shape, own) in source.infos.items():
        if key.startswith(MODEL + prefix):
            target = EXPORT_DTYPES[dtype] if dtype is not None and own.is_floating_point else own
            out[key[len(MODEL + prefix) :]] = key, (shape, target)
    if not out:
        raise ValueError(
            message(
                "At least one tensor of the model must have the prefix.",
                got=f"prefix {prefix!r}; names are such as {next(iter(source.infos), 'none')[len(MODEL) :]!r}",
                source=source.path,
                change="give a prefix that the names have; `pardist checkpoint inspect PATH --tensors` lists them",
            )
        )
    return out


def _write_safetensors(path: str, source: Source, shard: dict[str, tuple[str, Info]]) -> Iterator[int]:
    """Writes one file of the safetensors format: length of the header, header, bytes.

    The library would want all tensors of the file in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (_, info) in shard.items():
        shape, dtype = info
        end = position + nbytes_of(info)
        header[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = f"{path}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for key, info in shard.values():
                tensor: Tensor = source.read(key).to(info[1]).contiguous()
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                yield nbytes_of(info)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _check_export_folder(folder: str) -> None:
    found = [name for name in os.listdir(folder) if ".safetensors" in name] if os.path.isdir(folder) else []
    if found or os.path.isfile(folder):
        raise ValueError(
            message(
                "An export must not mix with other weights.",
                got=f"{', '.join(found[:3])} in the folder" if found else "a file",
                source=folder,
                change="choose another folder, or remove these files",
            )
        )
