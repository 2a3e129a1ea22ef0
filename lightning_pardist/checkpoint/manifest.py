"""``manifest.json``: what a checkpoint is, which files belong to it, and their checksums.

A folder is a complete checkpoint if and only if its manifest is there and says so: it is written after every rank has
written its files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.exchange import CheckpointError, CorruptCheckpointError
from lightning_pardist.checkpoint.storage import Storage

NAME = "manifest.json"
FORMAT = "lightning_pardist.checkpoint"
FORMAT_VERSION = 1
BLOCK_BYTES = 16 * 2**20
"""A checksum covers this much of a file, so that a rank checks what it reads and no more."""
_THREADS = 4
_READ_BYTES = 2**20


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    block_crc32: list[str]
    """CRC-32 of each block of ``BLOCK_BYTES``, in hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """What is written into ``manifest.json``."""

    package_version: str
    torch_version: str
    created: str
    """UTC, ISO 8601."""
    created_ns: int
    """The same in nanoseconds since the epoch: decides which of two checkpoints is newer."""
    step: int | None
    epoch: int | None
    layout: dict[str, Any]
    world_size: int
    model: dict[str, int]
    """``tensors`` and ``bytes``."""
    optimizers: list[dict[str, Any]]
    """Per optimizer ``class`` and ``groups`` (number of parameters, options that JSON can hold)."""
    aliases: dict[str, str]
    """``{further name: first name}``: tied parameters are stored once."""
    pickled: dict[str, list[str]]
    """Keys of ``trainer.pt`` and ``objects.pt`` that need ``weights_only=False``, with the classes they hold."""
    files: dict[str, FileRecord]
    data: str = ""
    """Folder below this one in which the files lie; empty where a folder can be renamed."""
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    block_bytes: int = BLOCK_BYTES
    extra: dict[str, Any] = field(default_factory=dict)
    """What the caller adds."""

    def to_json(self) -> bytes:
        """Returns the file's content; its last entry is the checksum of all others."""
        content = json.loads(json.dumps(asdict(self), default=str))  # as a reader will see it
        content["crc32"] = _crc_of(content)
        return json.dumps(content, indent=1).encode()


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CorruptCheckpointError: if it is missing, cut off or altered.
        CheckpointError: if it was written by a newer version of this package.
    """
    path = storage.join(folder, NAME)
    if not storage.is_file(path):
        raise CorruptCheckpointError(_broken(path, "there is no such file"))
    try:
        content = json.loads(storage.read(path))
        format_name, version = content["format"], content["format_version"]
        sound = content.pop("crc32", None) == _crc_of(content)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(_broken(path, f"it cannot be parsed: {error}")) from error
    if format_name != FORMAT or not isinstance(version, int):
        raise CorruptCheckpointError(_broken(path, f"its format is {format_name!r} {version!r}"))
    if version > FORMAT_VERSION:
        raise CheckpointError(
            message(
                "A checkpoint must not be of a newer format than this version of lightning_pardist knows.",
                got=f"format version {version}; this package reads up to {FORMAT_VERSION}",
                source=path,
                change="update lightning_pardist, or consolidate the checkpoint with the version that wrote it "
                f"({content.get('package_version')})",
            )
        )
    if not sound:
        raise CorruptCheckpointError(_broken(path, "its checksum does not match its content"))
    content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    return Manifest(**content)


def check_sizes(storage: Storage, folder: str, manifest: Manifest) -> None:
    """Checks that every file is there and as long as it was.

    Raises:
        CorruptCheckpointError: names the files that are not.
    """
    problems = []
    for name, record in manifest.files.items():
        path = storage.join(folder, manifest.data, name)
        if not storage.is_file(path):
            problems.append(f"{name} is missing")
        elif storage.size(path) != record.bytes:
            problems.append(f"{name} has {storage.size(path)} bytes instead of {record.bytes}")
    if problems:
        raise CorruptCheckpointError(_damaged(folder, problems))


def check_content(
    storage: Storage, folder: str, manifest: Manifest, wanted: Iterable[tuple[str, Sequence[tuple[int, int]] | None]]
) -> None:
    """Compares files with their checksums, several blocks at a time.

    Args:
        storage: holds the checkpoint.
        folder: the checkpoint.
        manifest: its manifest.
        wanted: file names, each with the (offset, length) stretches to check, or None for the whole file.

    Raises:
        CorruptCheckpointError: names the files and the place of the first damage in each.
    """
    jobs = [
        (name, block)
        for name, stretches in wanted
        for block in _blocks(manifest.files[name].bytes, manifest.block_bytes, stretches)
    ]

    def crc(job: tuple[str, int]) -> str:
        return _crc_of_block(storage, storage.join(folder, manifest.data, job[0]), job[1], manifest.block_bytes)

    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = pool.map(crc, jobs)
        found = [job for job, crc32 in zip(jobs, crcs) if crc32 != manifest.files[job[0]].block_crc32[job[1]]]
    if found:
        first: dict[str, int] = {}
        for name, block in found:
            first.setdefault(name, block)
        raise CorruptCheckpointError(
            _damaged(folder, [f"{name} differs from byte {b * manifest.block_bytes} on" for name, b in first.items()])
        )


def record_of(storage: Storage, path: str) -> FileRecord:
    """Returns a written file's size and checksums, read back from storage several blocks at a time."""
    size = storage.size(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs = pool.map(
            lambda block: _crc_of_block(storage, path, block, BLOCK_BYTES), _blocks(size, BLOCK_BYTES, None)
        )
        return FileRecord(size, list(crcs))


def record_of_bytes(payload: bytes) -> FileRecord:
    """Returns the record of a file with this content."""
    view = memoryview(payload)
    blocks = range(0, len(view), BLOCK_BYTES)
    return FileRecord(len(view), [hexadecimal(zlib.crc32(view[start : start + BLOCK_BYTES])) for start in blocks])


def _crc_of_block(storage: Storage, path: str, block: int, block_bytes: int) -> str:
    crc, left, view = 0, block_bytes, memoryview(bytearray(_READ_BYTES))
    with storage.open(path, "rb") as file:
        file.seek(block * block_bytes)
        # A small buffer that is used again stays in the processor's cache.
        while left and (length := file.readinto(view[: min(len(view), left)])):  # type: ignore[attr-defined]
            crc = zlib.crc32(view[:length], crc)
            left -= length
    return hexadecimal(crc)


def _blocks(size: int, block_bytes: int, stretches: Sequence[tuple[int, int]] | None) -> list[int]:
    if stretches is None:
        return list(range(-(-size // block_bytes)))
    touched: set[int] = set()
    for offset, length in stretches:
        if length:
            touched.update(range(offset // block_bytes, (offset + length - 1) // block_bytes + 1))
    return sorted(touched)


def _crc_of(content: dict[str, Any]) -> str:
    return hexadecimal(zlib.crc32(json.dumps(content, sort_keys=True).encode()))


def hexadecimal(crc: int) -> str:
    """Returns a CRC-32 as it stands in the manifest."""
    return f"{crc:08x}"


def _broken(path: str, problem: str) -> str:
    return message(
        "A checkpoint is complete only with a readable manifest.",
        got=problem,
        source=path,
        change="use an older checkpoint; this one was damaged, or its save did not finish",
    )


def _damaged(folder: str, problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return message(
        "The files of a checkpoint must be as they were written.",
        got="; ".join(problems[:5]) + more,
        source=folder,
        change="restore the files, or use an older checkpoint",
    )
