"""Reads the tensors of a torch.distributed.checkpoint folder box by box, without a process group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.exchange import CorruptCheckpointError
from lightning_pardist.checkpoint.objects import unreadable
from lightning_pardist.checkpoint.pieces import Entry
from lightning_pardist.checkpoint.storage import LocalStorage, Storage
from lightning_pardist.checkpoint.write import METADATA

_THREADS = 4


class DcpTensors:
    """The tensors in a folder, under the keys that its writer chose."""

    def __init__(self, storage: Storage, folder: str) -> None:
        path = storage.join(folder, METADATA)
        self._reader = storage.reader(folder)
        # Each thread opens the files anew; not every fsspec file system can do that at once.
        self._threads = _THREADS if isinstance(storage, LocalStorage) else 1
        self._metadata = read_metadata(path, storage.read(path))
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.infos: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (tuple(value.size), value.properties.dtype)
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def stretches(self, wanted: Mapping[str, Entry]) -> dict[str, list[tuple[int, int]]]:
        """Returns the parts (offset, length) of files that reading the entries touches."""
        out: dict[str, list[tuple[int, int]]] = {}
        for item in self._items(wanted):
            place = self._metadata.storage_data[item.storage_index]
            out.setdefault(place.relative_path, []).append((place.offset, place.length))
        return out

    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        """Fills the entries' pieces. Keys are the folder's; shapes must agree."""
        views = {(key, piece.offset): piece.view for key, entry in wanted.items() for piece in entry.pieces}
        items = sorted(self._items(wanted), key=self._place)
        size = -(-len(items) // self._threads) or 1

        def read(start: int) -> None:
            with torch.no_grad():  # the mode is the thread's own
                self._reader.read_data(LoadPlan(items[start : start + size]), _Into(views)).wait()

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(read, range(0, len(items), size)))

    def _place(self, item: ReadItem) -> tuple[str, int]:
        place = self._metadata.storage_data[item.storage_index]
        return place.relative_path, place.offset

    def _items(self, wanted: Mapping[str, Entry]) -> Iterable[ReadItem]:
        for key, entry in wanted.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            boxes = [
                ChunkStorageMetadata(torch.Size(piece.offset), piece.view.shape)
                for piece in entry.pieces
                if piece.view.numel()
            ]
            yield from create_read_items_for_chunk_list(key, saved, boxes)


class _Into(DefaultLoadPlanner):
    """Tells the reader where each box goes."""

    def __init__(self, views: Mapping[tuple[str, tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self._views = views

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        view = self._views[index.fqn, tuple(index.offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The box was filled in place."""


def read_metadata(path: str, payload: bytes) -> Metadata:
    """Returns torch's description of a folder, loading nothing but torch's own plain classes.

    torch pickles it and reads it back with ``pickle.load``, which would run whatever a forged file says.

    Raises:
        CorruptCheckpointError: if the file is no such description.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(payload)).load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise CorruptCheckpointError(unreadable(path, error)) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CorruptCheckpointError(unreadable(path, TypeError(f"it holds a {type(metadata).__name__}")))
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows torch.distributed.checkpoint's data classes, shapes, dtypes and paths."""

    def find_class(self, module: str, name: str) -> Any:
        plain = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
        if "." not in name:
            found = super().find_class(module, name)
            ours = isinstance(found, type) and found.__module__.startswith("torch.distributed.checkpoint.")
            path = module.partition(".")[0] == "pathlib" and isinstance(found, type)
            if ours or path or (module, name) in plain or isinstance(found, torch.dtype):
                return found
        raise pickle.UnpicklingError(
            message(
                "The description of a checkpoint holds plain data of torch only.",
                got=f"{module}.{name}",
                source=METADATA,
                change="do not load this file; it was forged or damaged",
            )
        )
