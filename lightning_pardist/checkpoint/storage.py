"""Where checkpoints lie: a local folder, or any file system that fsspec knows."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlparse

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter


class Storage(ABC):
    """The few operations that the checkpoint code needs. Paths are whole paths or URLs, as strings."""

    renames_atomically: bool
    """Whether a folder can be published by one rename; else the manifest, written last, is the mark."""

    def join(self, folder: str, *names: str) -> str:
        """Returns the path of something in a folder."""
        return "/".join([folder.rstrip("/"), *(name for name in names if name)])

    def split(self, path: str) -> tuple[str, str]:
        """Returns the folder that a path lies in, and its name there."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder or ".", name

    @abstractmethod
    def is_dir(self, path: str) -> bool: ...

    @abstractmethod
    def is_file(self, path: str) -> bool: ...

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def size(self, path: str) -> int: ...

    @abstractmethod
    def changed(self, path: str) -> float:
        """Returns when a file was last written, in seconds since the epoch."""

    @abstractmethod
    def make_folder(self, path: str) -> None: ...

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file, a link or a whole folder; nothing happens if there is none."""

    @abstractmethod
    def open(self, path: str, mode: str) -> IO[bytes]: ...

    @abstractmethod
    def write(self, path: str, payload: bytes) -> None:
        """Writes a file so that it is either whole or not there, and durable when this returns."""

    @abstractmethod
    def flush(self, path: str) -> None:
        """Makes a written file, or the names in a folder, durable."""

    @abstractmethod
    def writer(self, folder: str) -> FileSystemWriter: ...

    @abstractmethod
    def reader(self, folder: str) -> FileSystemReader: ...

    def read(self, path: str) -> bytes:
        """Returns a file's content."""
        with self.open(path, "rb") as file:
            return file.read()


class LocalStorage(Storage):
    """Folders of this machine, or of a file system that all machines mount."""

    renames_atomically = True

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def changed(self, path: str) -> float:
        return os.path.getmtime(path)

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            Path(path).unlink(missing_ok=True)

    def open(self, path: str, mode: str) -> IO[bytes]:
        return open(path, mode)

    def write(self, path: str, payload: bytes) -> None:
        temporary = f"{path}.part"
        with open(temporary, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def flush(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def writer(self, folder: str) -> FileSystemWriter:
        # We flush ourselves: the checksums are taken meanwhile.
        return FileSystemWriter(folder, sync_files=False)

    def reader(self, folder: str) -> FileSystemReader:
        return FileSystemReader(folder)


class RemoteStorage(Storage):
    """Anything with a URL that fsspec knows. A single object appears whole; folders do not."""

    renames_atomically = False

    def __init__(self, url: str, options: dict[str, Any] | None) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._options = options or {}
        self._fs, _ = url_to_fs(url, **self._options)

    def is_dir(self, path: str) -> bool:
        return bool(self._fs.isdir(path))

    def is_file(self, path: str) -> bool:
        return bool(self._fs.isfile(path))

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()  # other machines write here too
        if not self._fs.isdir(folder):
            return []
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in self._fs.ls(folder, detail=False)})

    def size(self, path: str) -> int:
        return int(self._fs.size(path))

    def changed(self, path: str) -> float:
        return float(self._fs.modified(path).timestamp())

    def make_folder(self, path: str) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)

    def open(self, path: str, mode: str) -> IO[bytes]:
        return self._fs.open(path, mode)

    def write(self, path: str, payload: bytes) -> None:
        with self._fs.open(path, "wb") as file:
            file.write(payload)

    def flush(self, path: str) -> None:
        """Objects are durable once they are closed."""

    def writer(self, folder: str) -> FileSystemWriter:
        writer = FileSystemWriter(folder, sync_files=False)
        writer.fs, writer.path = _FsspecFiles(self._fs), folder  # type: ignore[assignment]
        return writer

    def reader(self, folder: str) -> FileSystemReader:
        reader = FileSystemReader(folder)
        reader.fs, reader.path = _FsspecFiles(self._fs), folder  # type: ignore[assignment]
        return reader


class _FsspecFiles(FileSystemBase):
    """Lets torch's reader and writer use an open fsspec file system.

    torch has the like in a private module, which opens a file system of its own for every reader.
    """

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with self._fs.open(os.fspath(path), mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._fs.mv(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" in os.fspath(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._fs.exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm(os.fspath(path))


def open_storage(path: str | os.PathLike[str], options: dict[str, Any] | None = None) -> tuple[Storage, str]:
    """Returns the storage that a path or URL lies in, and the path to use with it.

    ``file://`` URLs are local paths: they keep the publishing by rename.
    """
    text = os.fspath(path)
    if "://" not in text:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    if text.startswith("file://"):
        return LocalStorage(), os.path.abspath(unquote(urlparse(text).path))
    return RemoteStorage(text, options), text.rstrip("/")
