"""Notes what the forward pass does with parameters, function by function, while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.base.torch_api import current_autograd_node, storage_key
from lightning_pardist.describe.known_values import tensors_in
from lightning_pardist.describe.record import named_tensors

UNSEEN = "an operation below torch's Python functions"
"""Name of an event that stands for what happened out of our sight (an autograd.Function, scripted code)."""


@dataclass(frozen=True)
class Event:
    """One call of a torch function whose arguments depend on parameters."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    on_batch: bool = False
    """An argument is a tensor of the batch (or a view of one)."""


@dataclass
class Trace:
    """What one forward pass did."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """First name -> the fake parameter."""
    constants: set[int] = field(default_factory=set)
    """Ids of the buffers."""
    events: list[Event] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors that leave the module, for a run of its forward."""


class TraceRecorder(TorchFunctionMode):
    """Active in the forward pass, above every other mode: sees calls as user code makes them."""

    def __init__(self, module: nn.Module, batch: Any) -> None:
        """Starts before the run.

        Args:
            module: the fake copy.
            batch: the fake batch.
        """
        super().__init__()
        self.trace = Trace(parameters=dict(module.named_parameters()))
        self.trace.constants = {id(buffer) for buffer in module.buffers()}
        self._buffers = list(module.buffers())  # ids stay theirs
        self._batch = {storage_key(tensor): tensor for _, tensor in named_tensors(batch, "batch")}
        self._depends = {id(parameter) for parameter in self.trace.parameters.values()}
        self._nodes: dict[Any, list[torch.Tensor]] = {}

    @contextmanager
    def watching(self, module: nn.Module, *, outputs: bool) -> Iterator[None]:
        """Records in this context.

        Args:
            module: the fake copy.
            outputs: True if what the module's forward returns leaves the run.
        """
        if outputs:
            module.register_forward_hook(self._keep_outputs)
        with self:
            yield

    def _keep_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        # Not the insides of other objects: a cache of keys and values for generation is not what training goes on with.
        fields = list(vars(output).values()) if hasattr(output, "__dict__") and not isinstance(output, dict) else []
        self.trace.outputs = list(
            tensors_in([output] if isinstance(output, (torch.Tensor, tuple, list, dict)) else fields)
        )

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args))
        out = func(*args, **kwargs)
        if current_autograd_node() is None:  # else recomputed in the backward pass: seen already
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> None:
        results = list(tensors_in(out))  # masks and indices too: they may be counted over a sharded dim
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            self._note_unseen(tensor)
        if not any(id(tensor) in self._depends for tensor in inputs):
            return
        if func is not torch.Tensor.__setitem__ and next(iter(tensors_in(out)), None) is None:
            return  # a question about the tensor, such as its shape
        on_batch = any(storage_key(tensor) in self._batch for tensor in inputs)
        self._add(Event(_name(func), tuple(args), dict(kwargs), out, on_batch), results)

    def _add(self, event: Event, results: list[torch.Tensor]) -> None:
        self.trace.events.append(event)
        for tensor in results:
            self._depends.add(id(tensor))
            if tensor.grad_fn is not None:
                self._nodes.setdefault(tensor.grad_fn, []).append(tensor)

    def _note_unseen(self, tensor: torch.Tensor) -> None:
        """Adds an event for a tensor that depends on parameters through calls that were not seen."""
        if id(tensor) in self._depends or tensor.grad_fn is None:
            return
        sources: list[torch.Tensor] = []
        waiting, visited = [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node in visited:
                continue
            visited.add(node)
            sources += self._nodes.get(node, [])
            if node not in self._nodes:
                waiting += [before for before, _ in node.next_functions if before is not None]
                sources += [node.variable] if hasattr(node, "variable") else []
        self._add(Event(UNSEEN, tuple(sources), {}, tensor), [tensor])


def _name(func: Callable[..., Any]) -> str:
    """Returns the function's plain name: ``add`` for ``torch.add``, ``Tensor.add_`` and ``Tensor.__radd__``."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":  # a property of Tensor, such as T
        return getattr(getattr(func, "__self__", None), "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return _OPERATORS.get(name, name)
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


_OPERATORS = {
    "radd": "add", "iadd": "add", "rsub": "sub", "isub": "sub", "rmul": "mul", "imul": "mul", "truediv": "div",
    "rtruediv": "div", "itruediv": "div", "rpow": "pow", "ipow": "pow", "rmatmul": "matmul", "imatmul": "matmul",
    "rdiv": "div", "idiv": "div",
}  # fmt: skip
