"""Notes what the forward pass does with parameters, function by function, while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pardist.base.function_names import function_name
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.torch_api import current_autograd_node, storage_key
from lightning_pardist.describe.named_tensors import named_tensors
from lightning_pardist.describe.watched_sizes import WatchedSizes

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
class Call:
    """One call of any torch function, in the order of the run."""

    name: str
    modules: tuple[str, ...]
    """Names of the modules whose forward was running, outer to inner."""
    entry: int
    """Counts the calls of modules: which call of the innermost one this was."""
    event: int | None
    """Index of its event; None if nothing in it depends on parameters."""
    compared: torch.Tensor | None = None
    """The tensor whose sizes it asks for, if the code compares them with sizes that it worked out otherwise."""


@dataclass
class ModuleCall:
    """What a module was first called with, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


@dataclass
class Trace:
    """What one forward pass did."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """First name -> the fake parameter."""
    constants: set[int] = field(default_factory=set)
    """Ids of the buffers."""
    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    module_calls: dict[str, ModuleCall] = field(default_factory=dict)
    """Module name -> its first call."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Tensors that leave the module, for a run of its forward."""

    def module_of(self, event: Event) -> str:
        """Returns the name of the module whose forward made a call; for what was not seen, of the call after it."""
        index = next(i for i, other in enumerate(self.events) if other is event)
        later = (call for call in self.calls if call.event is not None and call.event >= index and call.modules)
        return next((call.modules[-1] for call in later), "")


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
        self._running: list[str] = []
        self._first: list[bool] = []
        """Of the running calls: is it the first one of its module?"""
        self._entries = [0]
        self._count = 0

    @contextmanager
    def watching(self, module: nn.Module, *, outputs: bool) -> Iterator[None]:
        """Records in this context.

        Args:
            module: the fake copy.
            outputs: True if what the module's forward returns leaves the run.
        """
        if outputs:
            module.register_forward_hook(self._keep_outputs)
        for name, child in module.named_modules():
            child.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            child.register_forward_hook(partial(self._leave, name), always_call=True)
        with self:
            yield

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(name)
        self._count += 1
        self._entries.append(self._count)
        is_first = current_autograd_node() is None and name not in self.trace.module_calls
        if is_first:
            self.trace.module_calls[name] = ModuleCall(args, dict(kwargs))
        self._first.append(is_first)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._first.pop():
            self.trace.module_calls[name].output = output
        self._running.pop()
        self._entries.pop()

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
            before = len(self.trace.events)
            self._note(func, args, kwargs, out)
            is_noted = len(self.trace.events) > before and self.trace.events[-1].out is out
            event = len(self.trace.events) - 1 if is_noted else None
            call = Call(function_name(func), tuple(self._running), self._entries[-1], event)
            self.trace.calls.append(call)
            if type(out) is torch.Size and call.name in ("size", "shape") and id(args[0]) in self._depends:
                return WatchedSizes(out, lambda: setattr(call, "compared", args[0]))
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
        self._add(Event(function_name(func), tuple(args), dict(kwargs), out, on_batch), results)

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
