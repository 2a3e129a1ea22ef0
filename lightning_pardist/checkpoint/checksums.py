"""Checksums of files while they are written, for storage from which reading back would cost a transfer."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from io import IOBase
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from lightning_pardist.checkpoint.manifest import BLOCK_BYTES, FileRecord, hexadecimal


class ChecksummedFiles(FileSystemBase):
    """Stands between torch's writer and its file system, and keeps the record of every file that is written.

    Args:
        inner: the file system.
    """

    def __init__(self, inner: FileSystemBase) -> None:
        self._inner = inner
        self._streams: dict[str, _Counted] = {}

    def records(self) -> dict[str, FileRecord]:
        """Returns the record of every file written so far, by name."""
        return {name: stream.record() for name, stream in self._streams.items()}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with self._inner.create_stream(path, mode) as stream:
            counted = self._streams[os.path.basename(os.fspath(path))] = _Counted(stream)
            yield counted  # type: ignore[misc]

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return self._inner.concat_path(path, suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._inner.rename(path, new_path)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return self._inner.init_path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._inner.mkdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._inner.exists(path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._inner.rm_file(path)


class _Counted:
    """What torch's writer asks of a stream; it only ever appends."""

    def __init__(self, stream: IOBase) -> None:
        self._stream: Any = stream
        self._total = 0
        self._blocks: list[str] = []
        self._crc = 0

    def tell(self) -> int:
        return self._total

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        while view:
            part = view[: BLOCK_BYTES - self._total % BLOCK_BYTES]
            self._crc = zlib.crc32(part, self._crc)
            self._total += len(part)
            if self._total % BLOCK_BYTES == 0:
                self._blocks.append(hexadecimal(self._crc))
                self._crc = 0
            view = view[len(part) :]
        return self._total

    def record(self) -> FileRecord:
        rest = [hexadecimal(self._crc)] if self._total % BLOCK_BYTES else []
        return FileRecord(self._total, [*self._blocks, *rest])
