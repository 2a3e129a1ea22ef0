"""A checkpoint appears under its name whole or not at all, and the one before it lives until then.

[Note: publishing] Where folders can be renamed, files are written into ``.<name>.tmp-<token>`` beside the target. When
all ranks have written, rank 0 adds the manifest and renames the folder. If the name is taken, the old one is renamed to
``.<name>.old-<token>`` before and removed after; a kill between the two renames leaves two complete checkpoints under
those names, and ``recover`` puts the newer one in place at the next start.
Object stores cannot rename: there the files go to ``<name>/save-<token>/`` and the manifest, a single object that
appears whole and says which ``save-`` folder counts, is written last.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint import lock, manifest
from lightning_pardist.checkpoint.exchange import CheckpointError
from lightning_pardist.checkpoint.storage import Storage

_log = get_logger(__name__)
_ASIDE = re.compile(r"^\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<token>[0-9a-f]{12})(\.part)?$")
_SAVE = re.compile(r"^save-[0-9a-f]{12}$")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    target: str
    folder: str
    """Where the files go."""
    data: str
    """What the manifest says about it: the part of ``folder`` below ``target``, or empty."""
    token: str


def begin(storage: Storage, target: str, *, is_folder: bool) -> Draft:
    """Returns a place to write to. Rank 0 only.

    Raises:
        ValueError: if something else lies under the name, or another run writes beside it.
    """
    parent, name = storage.split(target)
    _check_target(storage, target, is_folder=is_folder)
    storage.make_folder(parent)
    lock.acquire(storage, parent)
    recover_once(storage, parent)
    token = secrets.token_hex(6)
    if storage.renames_atomically:
        draft = Draft(target, storage.join(parent, f".{name}.tmp-{token}"), "", token)
    else:
        draft = Draft(target, storage.join(target, f"save-{token}"), f"save-{token}", token)
    if is_folder:
        storage.make_folder(draft.folder)
    return draft


def publish(storage: Storage, draft: Draft, content: manifest.Manifest) -> None:
    """Makes the draft the checkpoint of its name. Rank 0 only, after every rank has written."""
    payload = content.to_json()
    if not storage.renames_atomically:
        storage.write(storage.join(draft.target, manifest.NAME), payload)
        for name in storage.names(draft.target):
            if _SAVE.match(name) and name != draft.data:
                storage.remove(storage.join(draft.target, name))
        return
    storage.write(storage.join(draft.folder, manifest.NAME), payload)
    storage.flush(draft.folder)
    parent, name = storage.split(draft.target)
    aside = storage.join(parent, f".{name}.old-{draft.token}")
    replaced = os.path.lexists(draft.target)
    if replaced:
        os.rename(draft.target, aside)
    try:
        os.rename(draft.folder, draft.target)
    except OSError:
        if replaced:
            os.rename(aside, draft.target)
        raise
    storage.flush(parent)
    if replaced:
        storage.remove(aside)


def abandon(storage: Storage, draft: Draft) -> None:
    """Removes a draft after a failure, as far as that is still possible. Rank 0 only."""
    try:
        storage.remove(draft.folder)
    except OSError as error:
        _log.warning("%s: the unfinished checkpoint stays behind until the next start: %s", draft.folder, error)


def recover(storage: Storage, folder: str) -> None:
    """Finishes or removes what a dead run has left in a folder: see the note at the top. The lock must be ours."""
    leftovers = [(match, found) for found in storage.names(folder) if (match := _ASIDE.match(found))]
    # Newer drafts before older checkpoints: either may take an empty place.
    for match, found in sorted(leftovers, key=lambda item: item[0]["kind"], reverse=True):
        path, target = storage.join(folder, found), storage.join(folder, match["name"])
        if not os.path.lexists(target) and is_complete(storage, path):
            _log.warning("%s: put in place after a save that was cut short", target)
            os.rename(path, target)
        else:
            _log.warning("%s: removed; left by a save that was cut short", path)
            storage.remove(path)


def is_aside(name: str) -> bool:
    """Returns whether a name is one under which a save keeps what is not in place."""
    return _ASIDE.match(name) is not None


def is_complete(storage: Storage, folder: str) -> bool:
    """Returns whether a folder holds a complete checkpoint, by its manifest and the files' sizes."""
    try:
        manifest.check_sizes(storage, folder, manifest.read_manifest(storage, folder))
    except (CheckpointError, OSError):
        return False
    return True


_recovered: set[str] = set()


def recover_once(storage: Storage, folder: str) -> None:
    """Recovers a folder the first time this process comes to it: later leftovers are its own and live."""
    if storage.renames_atomically and folder not in _recovered:
        recover(storage, folder)
    _recovered.add(folder)


def _check_target(storage: Storage, target: str, *, is_folder: bool) -> None:
    if storage.renames_atomically and os.path.islink(target):
        return  # a link goes, what it points to stays
    if is_folder:
        if storage.is_file(target):
            problem = "a file lies there"
        elif storage.is_dir(target) and storage.names(target) and not _is_ours(storage, target):
            problem = "a folder lies there that is not a checkpoint of lightning_pardist"
        else:
            return
    elif storage.is_dir(target):
        problem = "a folder lies there"
    else:
        return
    raise ValueError(
        message(
            f"A {'sharded' if is_folder else 'full'} checkpoint is a {'folder' if is_folder else 'file'}, "
            "and nothing else may be overwritten by it.",
            got=problem,
            source=target,
            change="save under another name, remove what is there, or set CheckpointOptions.format",
        )
    )


def _is_ours(storage: Storage, folder: str) -> bool:
    if storage.is_file(storage.join(folder, manifest.NAME)):
        return True
    return not storage.renames_atomically and all(_SAVE.match(name) for name in storage.names(folder))
