"""Batches, arguments and outputs of any structure: containers of containers with tensors and other values in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the same structure with ``function`` applied to everything that is no container.

    Containers are lists, tuples (named ones too), mappings of any class, dataclasses, and plain objects that have
    tensors or containers as attributes. None of them is changed. A dataclass with ``is_nested_leaf`` is no container.
    """
    parts = children(value)
    if parts is None:
        return function(value)
    return rebuild(value, [map_leaves(function, part) for part in parts])


def children(value: Any) -> list[Any] | None:
    """Returns what a container holds, None for a leaf."""
    if isinstance(value, MutableMapping):
        return list(value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return list(value)
    keys = _attributes(value)
    return None if keys is None else [getattr(value, key) for key in keys]


def rebuild(value: Any, parts: Sequence[Any]) -> Any:
    """Returns a copy of a container that holds ``parts`` instead, in the order of ``children``."""
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        for key, part in zip(list(value), parts, strict=True):
            mapping[key] = part
        return mapping
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        if type(value) is list:
            return list(parts)
        listed = copy.copy(value)
        listed[:] = parts
        return listed
    result = copy.copy(value)
    for key, part in zip(_attributes(value) or (), parts, strict=True):
        object.__setattr__(result, key, part)
    return result


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in a structure, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def leaves(value: Any) -> Iterator[Any]:
    """Yields everything in a structure that is no container, in order."""
    parts = children(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from leaves(part)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in the arguments or results of a call, in order.

    Containers are lists, tuples and mappings here; of anything else nothing is looked into, see ``tensors_of``.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def map_arguments(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns the arguments of a call with ``function`` applied to everything in their lists, tuples and dicts."""
    if isinstance(value, (tuple, list)):
        return type(value)([map_arguments(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_arguments(function, item) for key, item in value.items()}
    return function(value)


def _attributes(value: Any) -> list[str] | None:
    if isinstance(value, (type, nn.Module, Tensor)) or callable(value) or getattr(value, "is_nested_leaf", False):
        return None
    if is_dataclass(value):
        return [field.name for field in fields(value) if hasattr(value, field.name)]
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return None
    keys = [key for key, item in attributes.items() if isinstance(item, (Tensor, MutableMapping, list, tuple))]
    holds_tensors = any(isinstance(item, Tensor) for key in keys for item in leaves(attributes[key]))
    return keys if holds_tensors else None
