"""Which checkpoint of a folder to resume from: the newest complete one, decided by rank 0 for all."""

from __future__ import annotations

import zipfile
from typing import Any

import torch.distributed as dist

from lightning_pardist.checkpoint import lock, manifest, publish
from lightning_pardist.checkpoint.exchange import CheckpointError, Exchange
from lightning_pardist.checkpoint.storage import Storage, open_storage


def complete_checkpoints(folder: str, storage_options: dict[str, Any] | None = None) -> list[str]:
    """Returns the complete checkpoints in a folder, newest first: folders of ours and Lightning ``.ckpt`` files.

    What a dead run has left half-done is put right first, unless a run that lives writes into the folder. One process
    only; in a run of several use ``newest_complete``.
    """
    storage, folder = open_storage(folder, storage_options)
    if storage.renames_atomically and storage.is_dir(folder) and lock.is_free(storage, folder):
        try:
            held = lock.holds(storage, folder)
            lock.acquire(storage, folder, wait_s=0)
            publish.recover_once(storage, folder)
            if not held:
                lock.release(storage, folder)
        except (OSError, ValueError):  # a folder we may read but not write, or one that was taken this moment
            pass
    found = []
    for name in storage.names(folder):
        if name.startswith("."):
            continue
        path = storage.join(folder, name)
        made = _made(storage, path)
        if made is not None:
            found.append((made, path))
    return [path for _, path in sorted(found, reverse=True)]


def finish_interrupted(folder: str, storage_options: dict[str, Any] | None = None) -> None:
    """Puts right what a dead run has left half-done in a folder, so that its checkpoints have their names.

    Any number of processes may call it at once: when it returns, one of them has done it. A folder into which a run
    that lives writes is left alone.
    """
    storage, folder = open_storage(folder, storage_options)
    if not (storage.renames_atomically and any(publish.is_aside(name) for name in storage.names(folder))):
        return
    held = lock.holds(storage, folder)
    try:
        lock.acquire(storage, folder)
        publish.recover_once(storage, folder)
        if not held:
            lock.release(storage, folder)
    except (OSError, ValueError):  # a folder that we may only read, or another run's
        pass


def newest_complete(
    folder: str,
    *,
    storage_options: dict[str, Any] | None = None,
    control_group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
) -> str | None:
    """Returns the newest complete checkpoint of a folder, the same on all ranks; None if there is none."""
    exchange = Exchange(control_group, timeout_s)
    return exchange.share(
        "choosing a checkpoint", lambda: next(iter(complete_checkpoints(folder, storage_options)), None)
    )


def _made(storage: Storage, path: str) -> float | None:
    """Returns when a complete checkpoint was made, in seconds since the epoch; None if it is none."""
    try:
        if storage.is_dir(path):
            content = manifest.read_manifest(storage, path)
            manifest.check_sizes(storage, path, content)
            return content.created_ns / 1e9
        with storage.open(path, "rb") as file:
            # The end of a zip file is written last.
            return storage.changed(path) if path.endswith(".ckpt") and zipfile.is_zipfile(file) else None
    except (CheckpointError, OSError):
        return None
