"""Anything that weights, or a whole run, can be loaded from, behind one face: read these boxes of these tensors."""

from __future__ import annotations

import os
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint import manifest, objects
from lightning_pardist.checkpoint.dcp import DcpTensors
from lightning_pardist.checkpoint.exchange import CorruptCheckpointError
from lightning_pardist.checkpoint.full import OURS
from lightning_pardist.checkpoint.names import without_wrappers
from lightning_pardist.checkpoint.pieces import Entry, Piece
from lightning_pardist.checkpoint.state import MODEL, OPTIMIZER
from lightning_pardist.checkpoint.storage import LocalStorage, Storage
from lightning_pardist.checkpoint.write import METADATA

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


class ShardedSource(Source):
    """A folder that this package has written."""

    whole_run = True

    def __init__(self, storage: Storage, path: str, *, verify: str = "size") -> None:
        super().__init__(path)
        self.storage = storage
        self.manifest = manifest.read_manifest(storage, path)
        self.verify = verify
        if verify != "off":
            manifest.check_sizes(storage, path, self.manifest)
            manifest.check_content(storage, path, self.manifest, [(METADATA, None)])
        self._dcp = DcpTensors(storage, storage.join(path, self.manifest.data))
        self.infos = self._dcp.infos
        self.aliases = self.manifest.aliases
        self._content: dict[str, Any] | None = None

    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        self._dcp.read_into(wanted)

    def check_content(self, wanted: Mapping[str, Entry]) -> None:
        if self.verify == "checksum":
            stretches = self._dcp.stretches(wanted)
            manifest.check_content(self.storage, self.path, self.manifest, list(stretches.items()))

    def trainer(self, *, weights_only: bool) -> dict[str, Any]:
        return self.unpack(objects.TRAINER, weights_only=weights_only)

    def optimizers(self) -> list[dict[str, Any]]:
        return self._objects()["optimizers"]

    def module_objects(self) -> dict[str, Any]:
        return self._objects()["module_objects"]

    def unpack(self, name: str, *, weights_only: bool) -> dict[str, Any]:
        """Returns the content of one of the small files, checked."""
        if self.verify != "off":
            manifest.check_content(self.storage, self.path, self.manifest, [(name, None)])
        path = self.storage.join(self.path, self.manifest.data, name)
        pickled = self.manifest.pickled.get(name, [])
        return objects.unpack(self.storage.read(path), weights_only=weights_only, source=path, pickled=pickled)

    def set_weights_only(self, weights_only: bool) -> None:
        """Reads ``objects.pt`` now, so that a refusal comes before anything is loaded."""
        self._content = self.unpack(objects.OBJECTS, weights_only=weights_only)

    def _objects(self) -> dict[str, Any]:
        if self._content is None:
            self.set_weights_only(True)
        assert self._content is not None
        return self._content


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


class LightningFolderSource(Source):
    """A folder of Lightning's own ModelParallelStrategy or FSDPStrategy, or any of torch.distributed.checkpoint."""

    def __init__(self, storage: Storage, path: str) -> None:
        super().__init__(path)
        self._dcp = DcpTensors(storage, path)
        prefix = next((p for p in ("state_dict.", "model.") if any(k.startswith(p) for k in self._dcp.infos)), "")
        self._keys = {MODEL + without_wrappers(k[len(prefix) :]): k for k in self._dcp.infos if k.startswith(prefix)}
        self.infos = {key: self._dcp.infos[theirs] for key, theirs in self._keys.items()}

    def read_into(self, wanted: Mapping[str, Entry]) -> None:
        self._dcp.read_into({self._keys[key]: entry for key, entry in wanted.items()})


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
        import json

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


def open_source(
    storage: Storage,
    path: str,
    *,
    verify: str = "size",
    weights_only: bool = True,
    prefix: str | None = "",
    live: Sequence[Sequence[str]] = (),
    names: Collection[str] = (),
) -> Source:
    """Returns what lies at a path, whichever of the known kinds it is.

    Args:
        storage: of ``path``.
        path: a folder or a file.
        verify: see ``CheckpointOptions.verify_on_load``.
        weights_only: never run code of a file.
        prefix: of the module's names before those in a safetensors folder, as ``"model."``; None to find it.
        live: parameter names per optimizer, for files that number them.
        names: of the module, to find the prefix.

    Raises:
        FileNotFoundError: if nothing lies there.
        ValueError: if it is no kind of checkpoint that is known.
        CorruptCheckpointError: if it is one, and damaged.
    """
    if storage.is_file(path):
        if path.endswith(".safetensors"):
            return SafetensorsSource(path, prefix, names)
        return FileSource(storage, path, weights_only=weights_only, live=live)
    if not storage.is_dir(path):
        raise FileNotFoundError(_unknown(path, "nothing lies there"))
    found = storage.names(path)
    if manifest.NAME in found:
        source = ShardedSource(storage, path, verify=verify)
        source.set_weights_only(weights_only)
        return source
    if objects.TRAINER in found or objects.OBJECTS in found:
        manifest.read_manifest(storage, path)  # raises: ours, but its manifest is gone
    if METADATA in found:
        return LightningFolderSource(storage, path)
    if any(name.endswith(".safetensors") for name in found):
        return SafetensorsSource(path, prefix, names)
    raise ValueError(_unknown(path, f"a folder with {', '.join(found[:5]) or 'nothing in it'}"))


def _unknown(path: str, got: str) -> str:
    return message(
        "A checkpoint is a folder of lightning_pardist, a Lightning .ckpt file or sharded folder, or safetensors.",
        got=got,
        source=path,
        change="check the path; a save that was cut short leaves nothing under its name",
    )
