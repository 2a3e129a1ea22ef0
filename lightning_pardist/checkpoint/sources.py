"""Every kind of checkpoint that is known, and which of them lies at a path."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint import manifest, objects
from lightning_pardist.checkpoint.dcp import DcpTensors
from lightning_pardist.checkpoint.names import without_wrappers
from lightning_pardist.checkpoint.pieces import Entry
from lightning_pardist.checkpoint.source import Source
from lightning_pardist.checkpoint.source_safetensors import SafetensorsSource
from lightning_pardist.checkpoint.source_torch_file import FileSource
from lightning_pardist.checkpoint.state import MODEL
from lightning_pardist.checkpoint.storage import Storage
from lightning_pardist.checkpoint.write import METADATA


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
