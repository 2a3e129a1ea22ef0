"""A copy of a module (or a batch) whose tensors are all fake: no memory, and nothing of the original can change.

``copy.deepcopy`` would do most of it, but stops at the first lock or process group, drags in whatever a module refers
to (a trainer, a dataset of many gigabytes) and copies tensors it was not told about.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import threading
import types
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_pardist.base.batch_norm import is_batch_norm
from lightning_pardist.base.torch_api import FakeTensorMode

_ATOMIC = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, type(Ellipsis), type(NotImplemented),
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType, property,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, weakref.ReferenceType,
)  # fmt: skip
_SHARED = (Dataset, IterableDataset, DataLoader, Sampler, torch.Generator, threading.Thread)
"""Kinds that a training step reads at most, and that may be large or tied to the process: referred to, not copied."""
_LARGE_ARRAY_BYTES = 1 << 20
_SHARED_PACKAGES = ("torch.distributed", "lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Objects of these packages that are no modules (trainer, strategies, meshes, process groups) belong to the process."""


class Copier:
    """Copies object graphs so that every tensor in them is copied once, however many names it has; values are kept."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []

    def stand_in(self, original: object, replacement: object) -> None:
        """Makes ``replacement`` appear in every copy where ``original`` would."""
        self._remember(original, replacement)

    def copy(self, value: Any) -> Any:
        """Returns ``value`` with copied tensors; what cannot be copied is referred to instead."""
        key = id(value)
        if key in self._memo:
            return self._memo[key]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor(value))
        if isinstance(value, types.FunctionType) and _encloses_tensors(value):
            return self._copy_function(value)
        if isinstance(value, _ATOMIC) or self._is_shared(value):
            return value
        if type(value) in (list, dict, collections.OrderedDict, tuple, set, frozenset):
            return self._copy_container(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        return self._copy_object(value)

    def _is_shared(self, value: object) -> bool:
        if isinstance(value, nn.Module):
            return False
        if isinstance(value, np.ndarray):
            return value.nbytes > _LARGE_ARRAY_BYTES
        return isinstance(value, _SHARED) or type(value).__module__.startswith(_SHARED_PACKAGES)

    def _remember(self, original: Any, replacement: Any) -> Any:
        self._memo[id(original)] = replacement
        self._alive.append(original)  # its id must not be given to another object while the memo lives
        return replacement

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._like(tensor, tensor.detach().clone())

    @staticmethod
    def _like(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same kind and with the same marks."""
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
        elif tensor.requires_grad:
            made.requires_grad_()
        return made

    def _copy_function(self, function: types.FunctionType) -> types.FunctionType:
        """Returns the function over copies of what it encloses, or a patched forward would run the original module."""
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        result = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        result.__kwdefaults__ = function.__kwdefaults__
        result.__dict__.update(function.__dict__)
        self._remember(function, result)
        for cell, original in zip(cells, function.__closure__ or ()):
            with suppress(ValueError):  # a variable that has no value yet
                cell.cell_contents = self.copy(original.cell_contents)
        return result

    def _copy_container(self, value: Any) -> Any:
        if isinstance(value, (tuple, set, frozenset)):
            return self._remember(value, type(value)([self.copy(item) for item in value]))
        result = self._remember(value, type(value)())  # before its items: it may contain itself
        if isinstance(value, list):
            result.extend(self.copy(item) for item in value)
        else:
            result.update((self.copy(key), self.copy(item)) for key, item in value.items())
        return result

    def _copy_object(self, value: Any) -> Any:
        # A module must be copied, or the run would touch the original's parameters: its errors are not swallowed.
        if isinstance(value, nn.Module):
            return self._rebuild(value)
        try:
            return self._rebuild(value)
        except Exception:
            return self._remember(value, value)

    def _rebuild(self, value: Any) -> Any:
        if hasattr(type(value), "__deepcopy__"):
            return self._remember(value, value.__deepcopy__(self._memo))
        reduced = _parts(value)
        if isinstance(reduced, str):
            return value
        build, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        result = build(*(self.copy(argument) for argument in arguments))
        self._remember(value, result)
        if state is not None:
            _set_state(result, self.copy(state))
        for item in items or ():
            result.append(self.copy(item))
        for key, item in pairs or ():
            result[self.copy(key)] = self.copy(item)
        return result


class FakeCopier(Copier):
    """Copies object graphs so that every tensor in them becomes fake, once, however many names it has."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        """Starts with an empty memory.

        Args:
            mode: the fake mode that owns the new tensors.
            device: where all fake tensors live.
        """
        super().__init__()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._mode = mode
        self._device = device

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns every fake tensor made so far with the tensor it stands for."""
        return self._pairs

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        fake: torch.Tensor
        if plain.device == self._device:
            fake = self._mode.from_tensor(plain, static_shapes=True)
        else:
            with self._mode:
                fake = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=self._device)
        fake = self._like(tensor, fake)
        self._pairs.append((fake, tensor))
        return fake


def _encloses_tensors(function: types.FunctionType) -> bool:
    """Returns True if a variable of the function's closure is a module, a tensor, or a method of a module."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            content = cell.cell_contents
            owner = content.__self__ if isinstance(content, types.MethodType) else content
            if isinstance(owner, (nn.Module, torch.Tensor)):
                return True
    return False


def _parts(value: Any) -> Any:
    """Returns ``value`` in parts, as pickle would; a module that forbids pickling is taken apart by its attributes."""
    try:
        return value.__reduce_ex__(4)
    except Exception:
        if not isinstance(value, nn.Module):
            raise
        return copyreg.__newobj__, (type(value),), value.__dict__  # type: ignore[attr-defined]


def _set_state(target: Any, state: Any) -> None:
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    target.__dict__.update(attributes or {})
    for name, item in (slots or {}).items():
        setattr(target, name, item)


def lower_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a fake module the parameters it computes with when they are gathered in a lower dtype.

    Batch norms keep theirs, which must match their running statistics, and so do parameters of no dim.
    """
    lowered: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            if is_batch_norm(child) or not parameter.is_floating_point() or not parameter.dim():
                continue
            if id(parameter) not in lowered:
                with torch.no_grad():
                    lowered[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
            child.register_parameter(name, lowered[id(parameter)])
