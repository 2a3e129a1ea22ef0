"""Words for values that plans store as text."""

from __future__ import annotations

import torch


def dtype_word(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the module, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_word(word: str) -> torch.dtype:
    """Returns the dtype of that name."""
    dtype = getattr(torch, word)
    assert isinstance(dtype, torch.dtype), word
    return dtype
