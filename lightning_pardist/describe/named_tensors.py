"""The tensors in a structure, each with the path to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a batch, argument or output with their path, such as ``"batch.input_ids"``."""
    if isinstance(value, torch.Tensor):
        yield path or "0", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, _join(path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_tensors(item, _join(path, index))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for key, item in vars(value).items():
            if isinstance(item, (torch.Tensor, Mapping, list, tuple)):
                yield from named_tensors(item, _join(path, key))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
