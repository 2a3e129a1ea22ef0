"""Which line of the user's code ended the fake run, or asked for a value it does not have."""

from __future__ import annotations

import inspect
import linecache
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
_LIBRARIES = tuple(
    {str(Path(torch.__file__).resolve().parents[1]), *(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))}
)
_STANDARD_LIBRARY = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], "<frozen")


def blame(error: BaseException) -> str:
    """Returns ``file:line (code)`` of the user's line that raised ``error``, and the library's line below it if any."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _describe(frames)


def asking_line() -> str:
    """Returns ``file:line (code)`` of the user's line that is running now."""
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return _describe(frames[::-1], innermost_only=True)


def _describe(frames: list[tuple[str, int]], *, innermost_only: bool = False) -> str:
    """Describes the innermost frame that is the user's; frames run from the outermost to the innermost.

    A frame outside every library is the user's. Where there is none, a model library's line is the next best. When an
    error went on into such a library, its line is told as well.
    """
    outside_torch = [frame for frame in frames if not _is_machinery(frame[0])]
    users = [frame for frame in outside_torch if not frame[0].startswith(_LIBRARIES)]
    if not outside_torch:
        return "an unknown line"
    if not users or innermost_only:
        return _line(*outside_torch[-1])
    if outside_torch[-1] == users[-1]:
        return _line(*users[-1])
    return f"{_line(*users[-1])}, inside it {_line(*outside_torch[-1])}"


def _is_machinery(filename: str) -> bool:
    if filename.startswith((_PACKAGE, _TORCH, "<frozen")):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and not filename.startswith(_LIBRARIES)


def _line(filename: str, number: int) -> str:
    code = linecache.getline(filename, number).strip()
    return f"{filename}:{number} ({code})" if code else f"{filename}:{number}"
