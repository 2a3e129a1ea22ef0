"""Words for values that plans store as text, and names of modules."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def dtype_word(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_word(word: str) -> torch.dtype:
    """Returns the dtype of that name."""
    dtype = getattr(torch, word)
    assert isinstance(dtype, torch.dtype), word
    return dtype


def common_module(names: Iterable[str]) -> str:
    """Returns the name of the smallest module around all these modules; empty for the root."""
    split = [name.split(".") if name else [] for name in names]
    common = split[0] if split else []
    for parts in split:
        length = next((i for i, (a, b) in enumerate(zip(common, parts)) if a != b), min(len(common), len(parts)))
        common = common[:length]
    return ".".join(common)
