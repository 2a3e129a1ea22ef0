"""Checksums of files while they are written: a second thread follows the writer through the page cache."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import IOBase
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemBase

from lightning_pardist.checkpoint.manifest import BLOCK_BYTES, FileRecord, crc_of_next, hexadecimal

_READ_BYTES = 2**20


class ChecksummedFiles(FileSystemBase):
    """Stands between torch's writer and its file system, and keeps the record of every file that is written.

    Args:
        inner: the file system.
        follow: a thread for files of this machine, which can be read while they grow; None for others, whose bytes are
            summed up on their way.
    """

    def __init__(self, inner: FileSystemBase, follow: ThreadPoolExecutor | None) -> None:
        self._inner = inner
        self._follow = follow
        self._streams: dict[str, _Followed | _Counted] = {}

    def records(self) -> dict[str, FileRecord]:
        """Returns the record of every file written so far, by name."""
        return {name: stream.record() for name, stream in self._streams.items()}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with self._inner.create_stream(path, mode) as stream:
            if self._follow is None:
                kept: _Followed | _Counted = _Counted(stream)
            else:
                kept = _Followed(stream, os.fspath(path), self._follow)
            self._streams[os.path.basename(os.fspath(path))] = kept
            yield kept  # type: ignore[misc]

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


class _Stream:
    """What torch's writer asks of a stream; it only ever appends."""

    def __init__(self, stream: IOBase) -> None:
        self._stream: Any = stream
        self._total = 0

    def tell(self) -> int:
        return self._total

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class _Followed(_Stream):
    def __init__(self, stream: IOBase, path: str, pool: ThreadPoolExecutor) -> None:
        super().__init__(stream)
        self._path = path
        self._pool = pool
        self._blocks: list[Future[str]] = []

    def write(self, data: Any) -> int:
        length = int(self._stream.write(data))
        self._total += length
        if self._total // BLOCK_BYTES > len(self._blocks):
            self._stream.flush()
            self._submit(self._total // BLOCK_BYTES)
        return length

    def close(self) -> None:
        super().close()
        self._submit(-(-self._total // BLOCK_BYTES))

    def record(self) -> FileRecord:
        return FileRecord(self._total, [block.result() for block in self._blocks])

    def _submit(self, count: int) -> None:
        for block in range(len(self._blocks), count):
            self._blocks.append(self._pool.submit(_crc_of_block, self._path, block))


class _Counted(_Stream):
    def __init__(self, stream: IOBase) -> None:
        super().__init__(stream)
        self._blocks: list[str] = []
        self._crc = 0

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


def _crc_of_block(path: str, block: int) -> str:
    file: IO[bytes]
    with open(path, "rb", buffering=0) as file:
        file.seek(block * BLOCK_BYTES)
        return hexadecimal(crc_of_next(file, BLOCK_BYTES, bytearray(_READ_BYTES))[0])
