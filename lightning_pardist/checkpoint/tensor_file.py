"""Writes a ``torch.save`` file tensor by tensor: the file may be larger than memory.

``torch.serialization.skip_data`` writes everything but the tensors' bytes and leaves room for them. Where the room of
each tensor is, the file itself says: it is mapped once, and the addresses are compared with the records of the zip.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any

import torch
from torch import Tensor

from lightning_pardist.checkpoint.state import tensors_within

_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor whose memory is never touched, so that it costs none."""
    return torch.empty(shape, dtype=dtype)


def write_streaming(path: str, content: Mapping[str, Any], fill: Mapping[int, Callable[[], Tensor]]) -> Iterator[int]:
    """Writes ``content`` as ``torch.save`` does; yields the bytes written after every tensor.

    Args:
        path: a local file.
        content: plain containers, with ``placeholder`` tensors among others.
        fill: for each placeholder's id what makes its content, called one after the other and dropped.
    """
    unreachable = _save_skeleton(path, content, torch.serialization.skip_data())
    if unreachable:
        # Tensors inside objects cannot be found from outside, so all bytes are written, placeholders' included.
        _save_skeleton(path, content, nullcontext())
    rooms = _rooms(path, content)
    checksums: dict[int, int] = {}
    with open(path, "r+b") as file:
        for tensor_id, (offset, tensor) in rooms.items():
            make = fill.get(tensor_id)
            if make is None and unreachable:
                continue
            whole = (make() if make else tensor).contiguous()
            payload = _bytes_of(whole if make else _storage_of(whole))
            file.seek(offset)
            file.write(payload)
            checksums[offset] = zlib.crc32(payload)
            yield payload.nbytes
        _mend_checksums(file, checksums)
        file.flush()
        os.fsync(file.fileno())


def _save_skeleton(path: str, content: Mapping[str, Any], how: AbstractContextManager[None]) -> bool:
    """Returns whether the file has tensors that walking through ``content`` does not find."""
    with how:
        torch.save(content, path)
    found = {t.untyped_storage().data_ptr() for _, t in tensors_within(content) if t.untyped_storage().nbytes()}
    return len(_records(path)) != len(found)


def _rooms(path: str, content: Mapping[str, Any]) -> dict[int, tuple[int, Tensor]]:
    """Returns ``{id(tensor): (offset in the file, tensor)}``, one tensor per storage."""
    # What we have just written ourselves may hold any object.
    mapped = torch.load(path, mmap=True, map_location="cpu", weights_only=False)
    pairs: dict[int, Tensor] = {}
    for (_, there), (_, here) in zip(tensors_within(mapped), tensors_within(content), strict=True):
        if here.untyped_storage().nbytes():
            pairs.setdefault(there.untyped_storage().data_ptr(), here)
    if not pairs:
        return {}
    offsets = _records(path)
    first = min(pairs)
    for candidate in sorted(offsets):
        base = first - candidate
        if all(address - base in offsets for address in pairs):
            ordered = sorted(pairs.items())
            return {id(tensor): (address - base, tensor) for address, tensor in ordered}
    raise AssertionError(f"{path}: the mapped file does not match its own records")


def _records(path: str) -> set[int]:
    """Returns where the bytes of each storage start."""
    out = set()
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            folder = os.path.dirname(info.filename)
            if os.path.basename(folder) == "data" and info.file_size:
                file.seek(info.header_offset)
                header = file.read(_LOCAL_HEADER)
                lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                out.add(info.header_offset + _LOCAL_HEADER + lengths)
    return out


def _mend_checksums(file: IO[bytes], checksums: Mapping[int, int]) -> None:
    """Puts the CRC-32 of filled records where the zip format keeps them: after the data and in the directory."""
    with zipfile.ZipFile(file) as archive:
        infos, position = archive.infolist(), archive.start_dir
    for info in infos:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        offset = info.header_offset + _LOCAL_HEADER + lengths
        file.seek(position)
        entry = file.read(_CENTRAL_HEADER)
        if offset in checksums and info.file_size:
            crc = checksums[offset].to_bytes(4, "little")
            file.seek(position + 16)
            file.write(crc)
            file.seek(offset + info.file_size)
            if info.flag_bits & 8 and file.read(4) == b"PK\x07\x08":
                file.seek(offset + info.file_size + 4)
                file.write(crc)
        position += _CENTRAL_HEADER + sum(int.from_bytes(entry[i : i + 2], "little") for i in (28, 30, 32))


def _storage_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
