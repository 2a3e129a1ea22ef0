"""What can be done with a checkpoint outside of a run: no process group, never the whole model in memory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint import manifest
from lightning_pardist.checkpoint.full import lightning_checkpoint
from lightning_pardist.checkpoint.manifest import Manifest
from lightning_pardist.checkpoint.source import Info, Source
from lightning_pardist.checkpoint.sources import ShardedSource, open_source
from lightning_pardist.checkpoint.state import MODEL
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.checkpoint.tensor_file import placeholder, write_streaming


@dataclass(frozen=True)
class Description:
    """What ``inspect`` finds."""

    path: str
    kind: str
    tensors: dict[str, Info]
    """Shape and dtype of the model's tensors, by name."""
    manifest: Manifest | None = None
    optimizers: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the model's tensors."""
        return sum(nbytes_of(info) for info in self.tensors.values())

    def text(self, *, tensors: bool = False) -> str:
        """Returns a readable summary, with every tensor if asked."""
        rows = [("path", self.path), ("kind", self.kind)]
        if self.manifest is not None:
            content = self.manifest
            rows += [
                ("written", f"{content.created} by lightning_pardist {content.package_version}"),
                ("torch", content.torch_version),
                ("step, epoch", f"{content.step}, {content.epoch}"),
                ("layout", f"{json.dumps(content.layout)} on {content.world_size} ranks"),
                ("files", f"{len(content.files)}, {_size(sum(file.bytes for file in content.files.values()))}"),
                ("tied", ", ".join(f"{further} = {first}" for further, first in content.aliases.items()) or "none"),
                ("pickled objects", "; ".join(key for keys in content.pickled.values() for key in keys) or "none"),
            ]
        rows += [("model", f"{len(self.tensors)} tensors, {_size(self.nbytes)}")]
        rows += [(f"optimizer {index}", text) for index, text in enumerate(self.optimizers)]
        lines = [f"{name:<16} {value}" for name, value in rows]
        if tensors:
            lines += ["", *(f"{name}  {list(shape)}  {dtype}" for name, (shape, dtype) in self.tensors.items())]
        return "\n".join(lines)


def inspect(path: str, *, storage_options: dict[str, Any] | None = None) -> Description:
    """Returns what a checkpoint of any kind holds, without reading its tensors.

    Raises:
        FileNotFoundError, ValueError, CorruptCheckpointError: see ``open_source``.
    """
    source = open_for_reading(path, storage_options, weights_only=True, need_objects=False)
    tensors = {key[len(MODEL) :]: info for key, info in source.infos.items() if key.startswith(MODEL)}
    content = source.manifest if isinstance(source, ShardedSource) else None
    optimizers = [_optimizer_line(optimizer) for optimizer in (content.optimizers if content else [])]
    return Description(source.path, _kind(source), tensors, content, optimizers)


def verify(path: str, *, storage_options: dict[str, Any] | None = None, progress: bool = False) -> int:
    """Returns the number of bytes that were compared with their checksums.

    Raises:
        CorruptCheckpointError: names the files that are missing, cut off or altered.
    """
    storage, path = open_storage(path, storage_options)
    content = manifest.read_manifest(storage, path)
    manifest.check_sizes(storage, path, content)
    total = sum(record.bytes for record in content.files.values())
    with progress_bar("verify", total, progress) as bar:
        for name, record in content.files.items():
            manifest.check_content(storage, path, content, [(name, None)])
            bar.update(record.bytes)
    return total


def consolidate(
    source: str,
    destination: str,
    *,
    weights_only: bool = True,
    storage_options: dict[str, Any] | None = None,
    progress: bool = False,
) -> None:
    """Writes a checkpoint as one ordinary Lightning ``.ckpt`` file, which plain Lightning loads and resumes from.

    Memory: the largest tensor, not the model.

    Args:
        source: a checkpoint of any kind.
        destination: a local path; must not exist.
        weights_only: False if ``source`` holds pickled objects and you trust it.
        storage_options: for ``source``.
        progress: show a bar.

    Raises:
        ValueError: if something lies at ``destination``, or pickled objects may not be loaded.
    """
    opened = open_for_reading(source, storage_options, weights_only=weights_only)
    destination = _free(destination)
    tensors = {key: placeholder(*info) for key, info in opened.infos.items()}
    content = {"optimizers": opened.optimizers(), "module_objects": opened.module_objects()}
    checkpoint = lightning_checkpoint(tensors, content, opened.aliases, opened.trainer(weights_only=weights_only))
    fill = {id(tensor): _reader(opened, key) for key, tensor in tensors.items()}
    temporary = f"{destination}.part"
    try:
        with progress_bar("consolidate", sum(map(nbytes_of, opened.infos.values())), progress) as bar:
            for written in write_streaming(temporary, checkpoint, fill):
                bar.update(written)
        os.replace(temporary, destination)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def open_for_reading(
    path: str, storage_options: dict[str, Any] | None, *, weights_only: bool, need_objects: bool = True
) -> Source:
    """Returns the source at a path; ``need_objects=False`` leaves the part alone that may hold pickled objects."""
    storage, path = open_storage(path, storage_options)
    if not need_objects and storage.is_file(storage.join(path, manifest.NAME)):
        return ShardedSource(storage, path)
    return open_source(storage, path, weights_only=weights_only)


def _reader(source: Source, key: str) -> Any:
    return lambda: source.read(key)


def _free(destination: str) -> str:
    destination = os.path.abspath(os.path.expanduser(destination))
    if os.path.lexists(destination) or not os.path.isdir(os.path.dirname(destination)):
        exists = os.path.lexists(destination)
        raise ValueError(
            message(
                "The consolidated file must be new, in a folder that exists.",
                got="something lies there" if exists else "there is no such folder",
                source=destination,
                change="choose another name, or remove what is there" if exists else "create the folder",
            )
        )
    return destination


def progress_bar(what: str, total: int, progress: bool) -> tqdm[Any]:
    """Returns a bar over bytes, which shows only if asked."""
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=not progress)


def nbytes_of(info: Info) -> int:
    """Returns the bytes of a whole tensor."""
    return torch.Size(info[0]).numel() * info[1].itemsize


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _kind(source: Source) -> str:
    return {
        "ShardedSource": "sharded, of lightning_pardist",
        "FileSource": "one file, of Lightning",
        "LightningFolderSource": "sharded, of Lightning",
        "SafetensorsSource": "safetensors",
    }[type(source).__name__]


def _optimizer_line(optimizer: dict[str, Any]) -> str:
    groups = [f"{g['parameters']} parameters, lr {g['options'].get('lr')}" for g in optimizer["groups"]]
    return f"{optimizer['class']}: {'; '.join(groups)}"
