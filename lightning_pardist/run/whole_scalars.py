"""Lets code of hooks make a plain tensor out of numbers that are DTensors.

Lightning's ``grad_norm`` collects ``p.grad.norm()`` of all parameters with ``torch.tensor(list(...))``, which reads the
memory of each element and has no idea of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pardist.base.nested import map_leaves
from lightning_pardist.torch_dtensor_api import whole_tensor


class WholeScalars(TorchFunctionMode):
    """Active around hooks, on every rank of a mesh: making a number whole is a collective."""

    def __init__(self) -> None:
        super().__init__()
        self._is_active = False

    def __enter__(self) -> WholeScalars:
        super().__enter__()
        self._is_active = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_active = False
        super().__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Is not active in this context, for code of ours that a hook calls."""
        was_active = self._is_active
        if was_active:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if was_active:
                self.__enter__()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            args = (map_leaves(_whole, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _whole(item: Any) -> Any:
    return whole_tensor(item) if isinstance(item, DTensor) else item
