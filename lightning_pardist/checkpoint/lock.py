"""One run at a time writes into a folder; a dead run does not keep others out.

The lock is a file that says who holds it: host, process id and when that process started (ids are used again). On the
same host a dead holder is seen at once. Of another host only the file's age is known, so the holder renews it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint.storage import LocalStorage, Storage

NAME = ".pardist.lock"
RENEW_S = 30.0
"""How often a holder touches its locks."""
STALE_S = 300.0
"""A lock from another host that was not renewed for so long belongs to a dead run."""
GRACE_S = 5.0
"""How long a start waits for the run before it to finish dying."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one with the same id."""

    host: str
    pid: int
    started: str

    @classmethod
    def myself(cls) -> Owner:
        """Returns this process."""
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()))

    def is_dead(self) -> bool | None:
        """Returns whether the process is gone; None if it ran on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return _start_of(self.pid) != self.started


def acquire(storage: Storage, folder: str, *, wait_s: float = GRACE_S) -> None:
    """Takes the folder for this process, for good or until ``release``. Taking it twice is fine.

    Raises:
        ValueError: if another run that lives holds it.
    """
    path = storage.join(folder, NAME)
    if path in _held:
        return
    deadline = time.monotonic() + wait_s
    while (holder := _try_to_take(storage, path)) is not None:
        if time.monotonic() > deadline:
            raise ValueError(
                message(
                    "Only one run at a time may write checkpoints into a folder.",
                    got=f"process {holder.pid} on {holder.host} holds it and is alive",
                    source=path,
                    change="give this run a folder of its own, or end the other run",
                )
            )
        time.sleep(0.2)
    _held[path] = storage
    _start_renewing()


def is_free(storage: Storage, folder: str) -> bool:
    """Returns whether this process could write into the folder now."""
    path = storage.join(folder, NAME)
    return path in _held or (holder := _holder(storage, path)) is None or _is_gone(storage, path, holder)


def holds(storage: Storage, folder: str) -> bool:
    """Returns whether this process holds the folder."""
    return storage.join(folder, NAME) in _held


def release(storage: Storage, folder: str) -> None:
    """Gives a folder back; nothing happens if this process does not hold it."""
    path = storage.join(folder, NAME)
    if _held.pop(path, None) is not None and _holder(storage, path) == Owner.myself():
        storage.remove(path)


_held: dict[str, Storage] = {}
_renewing: threading.Thread | None = None


def _try_to_take(storage: Storage, path: str) -> Owner | None:
    """Returns who is in the way, or None if the lock is ours now."""
    holder = _holder(storage, path)
    if holder is not None and holder != Owner.myself():
        if not _is_gone(storage, path, holder):
            return holder
        _log.warning("%s: taking over from process %d on %s, which is dead", path, holder.pid, holder.host)
        _remove_stale(storage, path, holder)
    payload = json.dumps(asdict(Owner.myself())).encode()
    if isinstance(storage, LocalStorage):
        # A file that is written first and then linked is never seen half-written, and link() fails if one is there.
        draft = f"{path}.{os.getpid()}"
        Path(draft).write_bytes(payload)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    elif holder is None or holder != Owner.myself():
        storage.write(path, payload)
    now = _holder(storage, path)
    return None if now is None or now == Owner.myself() else now


def _remove_stale(storage: Storage, path: str, holder: Owner) -> None:
    """Removes a dead run's lock, but not the one that a third run has put in its place meanwhile."""
    if not isinstance(storage, LocalStorage):
        storage.remove(path)
        return
    grave = f"{path}.{os.getpid()}.stale"
    try:
        os.rename(path, grave)
    except FileNotFoundError:
        return
    if _holder(storage, grave) != holder:
        with contextlib.suppress(FileExistsError):
            os.link(grave, path)
    os.unlink(grave)


def _holder(storage: Storage, path: str) -> Owner | None:
    try:
        return Owner(**json.loads(storage.read(path)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # not ours or damaged: nobody can be asked
        return Owner("an unknown host", 0, "")


def _is_gone(storage: Storage, path: str, holder: Owner) -> bool:
    dead = holder.is_dead()
    if dead is not None:
        return dead
    try:
        return time.time() - storage.changed(path) > STALE_S
    except FileNotFoundError:
        return True


def _start_of(pid: int) -> str:
    """Returns when a process started (Linux: clock ticks since boot, with the boot's id); empty if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return "ended"  # its parent has not asked for its status yet
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"
    except (OSError, IndexError):
        return ""


def _start_renewing() -> None:
    global _renewing
    if _renewing is None or not _renewing.is_alive():
        _renewing = threading.Thread(target=_renew_forever, name="pardist-checkpoint-lock", daemon=True)
        _renewing.start()


def _renew_forever() -> None:
    while _held:
        time.sleep(RENEW_S)
        for path, storage in list(_held.items()):
            try:
                if isinstance(storage, LocalStorage):
                    os.utime(path)
                else:
                    storage.write(path, json.dumps(asdict(Owner.myself())).encode())
            except OSError as error:
                _log.warning("%s: cannot be renewed: %s", path, error)


@atexit.register
def _release_all() -> None:
    for path, storage in list(_held.items()):
        try:
            release(storage, storage.split(path)[0])
        except Exception as error:  # the interpreter is ending: an open lock is found stale by the next run
            _log.debug("%s: not released: %s", path, error)
