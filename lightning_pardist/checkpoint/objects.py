"""The part of a checkpoint that is no tensor of the model or an optimizer: written with ``torch.save`` by one rank.

``trainer.pt``: the caller's dictionary (loops, callbacks, schedulers, hyperparameters). ``objects.pt``: groups of the
optimizers, and optimizer and module state that is no tensor. ``rank-<r>.pt``: what differs between ranks.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import torch

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.exchange import CorruptCheckpointError

TRAINER = "trainer.pt"
OBJECTS = "objects.pt"


def rank_file(rank: int) -> str:
    """Returns the name of the file with what is one rank's own."""
    return f"rank-{rank:05d}.pt"


def pack(value: object) -> bytes:
    """Returns ``value`` as ``torch.save`` writes it: a copy that later changes do not reach."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack_own(payload: bytes) -> Any:
    """Returns what this process has packed itself, objects included."""
    return torch.load(io.BytesIO(payload), weights_only=False)


def unsafe_keys(file: IO[bytes]) -> list[str]:
    """Returns the top-level keys of a ``torch.save`` file that ``weights_only=True`` forbids, with their classes.

    Nothing of the file is run: every class in it is replaced by an inert one.
    """
    unsafe = set(unsafe_classes(file))
    if not unsafe:
        return []
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        content = _InertUnpickler(io.BytesIO(archive.read(name))).load()
    if not isinstance(content, dict):
        return [f"the whole file: {', '.join(sorted(unsafe))}"]
    found = {key: sorted(unsafe & set(_inert_names(value))) for key, value in content.items()}
    return [f"{key}: {', '.join(names)}" for key, names in found.items() if names]


def unsafe_classes(file: IO[bytes]) -> list[str]:
    """Returns the classes and functions in a ``torch.save`` file that ``weights_only=True`` forbids."""
    file.seek(0)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def unpack(payload: bytes, *, weights_only: bool, source: str, pickled: list[str]) -> Any:
    """Returns what ``pack`` was given.

    Args:
        payload: the file's content.
        weights_only: load plain data only, never run code of the file.
        source: the file, for errors.
        pickled: what ``unsafe_keys`` said when it was written.

    Raises:
        ValueError: if ``weights_only`` forbids an object; names its key and how to allow it.
        CorruptCheckpointError: if the content cannot be read at all.
    """
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if weights_only and unsafe_classes(io.BytesIO(payload)):
            raise ValueError(refusal(source, pickled)) from error
        raise CorruptCheckpointError(unreadable(source, error)) from error
    except (RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise CorruptCheckpointError(unreadable(source, error)) from error


def refusal(source: str, pickled: list[str]) -> str:
    """Returns what to say about pickled objects where only plain data is allowed."""
    classes = sorted({name for line in pickled for name in line.rpartition(": ")[2].split(", ")})
    allow = f"torch.serialization.add_safe_globals([{', '.join(classes)}])"
    return message(
        "Under weights_only=True a checkpoint may hold plain data only, no pickled objects.",
        got="; ".join(pickled),
        source=source,
        change=f"if you trust the file, allow the classes with {allow}, or load with weights_only=False",
    )


def unreadable(source: str, error: Exception) -> str:
    """Returns what to say about a file that cannot be parsed."""
    return message(
        "The files of a checkpoint must be as they were written.",
        got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        source=source,
        change="restore the file, or use an older checkpoint",
    )


class _Inert:
    """Stands for any object of a pickle: keeps what it was given and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        made = super().__new__(cls)
        made.parts = [*args, *kwargs.values()]
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.parts: list[object]

    def __setstate__(self, state: object) -> None:
        self.parts.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.parts.extend((key, value))

    def append(self, value: object) -> None:
        self.parts.append(value)

    def extend(self, values: Iterable[object]) -> None:
        self.parts.extend(values)


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(f"{module}.{name}", (_Inert,), {})

    def persistent_load(self, pid: object) -> None:
        return None


def _inert_names(value: object, seen: set[int] | None = None) -> Iterator[str]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[object] = ()
    if isinstance(value, type) and issubclass(value, _Inert):
        yield value.__name__
    elif isinstance(value, _Inert):
        yield type(value).__name__
        parts = value.parts
    elif isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    for part in parts:
        yield from _inert_names(part, seen)
