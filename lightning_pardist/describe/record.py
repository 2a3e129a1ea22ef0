"""Notes what a step does, operator by operator, while it runs on fake tensors.

The step is cut into *segments*: a segment ends where a candidate block is entered or left. Every cost and every use of
a parameter is noted for a segment. Which candidates are blocks, and so which phase a segment belongs to, is decided
after the run. A backward operator is noted for the segment whose forward made its autograd node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.torch_api import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    next_autograd_sequence_number,
    node_sequence_number,
    storage_key,
    written_arguments,
)
from lightning_pardist.describe.fake_rules import RULES
from lightning_pardist.describe.flops import formulas
from lightning_pardist.describe.known_values import KnownValues
from lightning_pardist.describe.named_tensors import named_tensors

aten = torch.ops.aten
_QUERIES = frozenset({torch.ops.prim.device.default, torch.ops.prim.layout.default})


@dataclass
class Segment:
    """A stretch of the forward pass inside one innermost call of a candidate block (or outside all)."""

    call: int | None
    flops_forward: int = 0
    flops_backward: int = 0
    saved_activation_bytes: int = 0


@dataclass
class SeenTensor:
    """A tensor that entered or left a call."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    made: int | str
    """The segment that wrote it last, or words for one that no operator wrote."""
    depends: int
    """Bit i: a parameter used in segment i went into its value."""


@dataclass
class Call:
    """One call of a candidate block."""

    name: str
    parent: int | None
    first: int
    """Index of its first segment."""
    last: int = -1
    inputs: list[SeenTensor] = field(default_factory=list)
    outputs: list[SeenTensor] = field(default_factory=list)


@dataclass
class _Origin:
    """What is known of one storage."""

    made: int | str
    depends: int = 0
    parameter: str | None = None
    counts_as_saved: bool = True


class StepRecorder(TorchDispatchMode):
    """The notes of one step."""

    def __init__(self, module: nn.Module, batch: Any, known: KnownValues) -> None:
        """Starts before the step.

        Args:
            module: the fake copy.
            batch: the fake batch.
            known: told of every operator.
        """
        super().__init__()
        self.segments = [Segment(None)]
        self.calls: list[Call] = []
        self.uses: dict[str, dict[int, None]] = {}
        """Parameter name -> segments that use it, in order."""
        self.called_modules: dict[str, None] = {}
        self.reached: dict[str, None] = {}
        """Names of the parameters that got a gradient, in order."""
        self._handles: list[RemovableHandle] = []
        """Of hooks that tensors hold out of sight of Python: left there, they would keep all this for ever."""
        self.users: dict[str, dict[str, None]] = {}
        """Parameter name -> modules whose forward was the innermost one running when it was used, in order."""
        self._running: list[str] = [""]
        self._known = known
        self._open: list[int] = []
        self._origins: dict[int, _Origin] = {}
        self._alive: list[Any] = []
        self._parameters: dict[int, str] = {}
        self._saved: set[int] = set()
        self._packed: list[torch.Tensor] = []
        self._indivisible: set[OpOverload] = set()
        self._node_starts = [next_autograd_sequence_number()]
        self._node_owners = [0]
        self._last_sequence_number = self._node_starts[0]
        self._register(module, batch)

    def _register(self, module: nn.Module, batch: Any) -> None:
        for buffer in module.buffers():
            self._origins[self._key(buffer)] = _Origin("constant", counts_as_saved=False)
        for name, parameter in module.named_parameters():
            self._parameters[id(parameter)] = name
            self._origins[self._key(parameter)] = _Origin(f"parameter:{name}", parameter=name, counts_as_saved=False)
        for name, tensor in named_tensors(batch, "batch"):
            self._origins.setdefault(self._key(tensor), _Origin(name))

    # ------------------------------------------------------------------------------------------------ calls of modules

    def watch(self, module: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        """Hooks the modules of the fake copy; ``candidates`` are those whose calls cut the step into segments."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._reached(name)))
        for name, child in module.named_modules():
            if name in candidates:
                child.register_forward_pre_hook(self._entering(name), prepend=True, with_kwargs=True)
                child.register_forward_hook(self._leaving(name))
            else:
                child.register_forward_pre_hook(self._calling(name), prepend=True)
            # The very first and the very last hook of a call, whether it ends or fails.
            child.register_forward_pre_hook(self._running_starts(name), prepend=True)
            child.register_forward_hook(self._running_ends, always_call=True)

    def _reached(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self.reached[name] = None

        return hook

    def _running_starts(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._running.append(name)

        return hook

    def _running_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _calling(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.called_modules[name] = None

        return hook

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.called_modules[name] = None
            if current_autograd_node() is not None:  # recomputed in the backward pass: the same call again
                return
            call = Call(name, self._open[-1] if self._open else None, first=len(self.segments))
            call.inputs = [self._see(path, tensor) for path, tensor in _arguments(args, kwargs)]
            self._open.append(len(self.calls))
            self.calls.append(call)
            self._start_segment()

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if current_autograd_node() is not None:
                return
            # Calls that an exception ended (and user code caught) never came here: they end with their caller.
            while self._open:
                call = self.calls[self._open.pop()]
                call.last = len(self.segments) - 1
                if call.name == name:
                    call.outputs = [self._see(path, tensor) for path, tensor in named_tensors(output)]
                    break
            self._start_segment()

        return hook

    def _start_segment(self) -> None:
        self.segments.append(Segment(self._open[-1] if self._open else None))
        self._last_sequence_number = next_autograd_sequence_number()
        self._own_nodes_from(self._last_sequence_number, len(self.segments) - 1)

    def _see(self, name: str, tensor: torch.Tensor) -> SeenTensor:
        origin = self._origins.get(storage_key(tensor), _Origin("constant"))
        shape = tuple(int(size) for size in tensor.shape)
        return SeenTensor(name, shape, tensor.dtype, tensor.requires_grad, origin.made, origin.depends)

    # -------------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUERIES:
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            out = func(*args, **kwargs)
            self._count(func, args, kwargs, out, self._owner())
            return out
        if func not in self._indivisible and func.overloadpacket not in formulas():
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            self._indivisible.add(func)
        out = self._run(func, args, kwargs)
        owner = self._owner()
        self._follow_nodes(owner)
        self._count(func.overloadpacket, args, kwargs, out, owner)
        if current_autograd_node() is None:
            self._trace(func, args, kwargs, out, owner)
        self._known.note(func, args, kwargs, out)
        return out

    def _run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        if func in RULES:
            return RULES[func](*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            real = self._known.result(func, args, kwargs)
            if real is not None:
                return self._known.adopt(real)
            if func is aten.index.Tensor:
                indices = [part for index in args[1] for part in self._positions(index)]
                return func(args[0], indices)
            if func is aten.masked_select.default:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                chosen = self._known.ask(args[1], lambda mask: int(mask.expand(shape).sum()))
                if chosen is not None:
                    return args[0].new_empty(chosen)
        return func(*args, **kwargs)

    def _positions(self, index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Returns a known boolean index as the integer indices it stands for, whose length is then known too."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        positions = self._known.ask(index, lambda mask: mask.nonzero(as_tuple=True))
        return [index] if positions is None else self._known.adopt(positions)

    def _count(self, operator: Any, args: Any, kwargs: Any, out: Any, owner: int) -> None:
        formula = formulas().get(operator)
        if formula is None:
            return
        flops = int(formula(*args, **kwargs, out_val=out))
        if current_autograd_node() is None:
            self.segments[owner].flops_forward += flops
        else:
            self.segments[owner].flops_backward += flops

    def _trace(self, func: OpOverload, args: Any, kwargs: Any, out: Any, owner: int) -> None:
        depends = 0
        for tensor in tensors_in((args, kwargs)):
            origin = self._origins.get(storage_key(tensor))
            parameter = self._parameters.get(id(tensor)) or (origin.parameter if origin else None)
            if parameter is not None:
                self.uses.setdefault(parameter, {})[owner] = None
                self.users.setdefault(parameter, {})[self._running[-1]] = None
                depends |= 1 << owner
            if origin is not None:
                depends |= origin.depends
        for tensor in tensors_in(out):
            if storage_key(tensor) not in self._origins:  # else a view, which holds what the storage held
                self._origins[self._key(tensor)] = _Origin(owner, depends)
        for tensor in tensors_in(written_arguments(func, args, kwargs)):
            origin = self._origins[storage_key(tensor)]
            if origin.counts_as_saved:
                origin.made, origin.depends = owner, origin.depends | depends

    def _key(self, tensor: torch.Tensor) -> int:
        if tensor.layout is torch.strided:
            self._alive.append(tensor.untyped_storage())  # its number must not be given to another storage
        else:
            self._alive.append(tensor)
        return storage_key(tensor)

    # --------------------------------------------------------------------------------------------- autograd

    def _owner(self) -> int:
        node = current_autograd_node()
        if node is None:
            return len(self.segments) - 1
        position = bisect_right(self._node_starts, node_sequence_number(node)) - 1
        return self._node_owners[max(position, 0)]

    def _own_nodes_from(self, sequence_number: int, owner: int) -> None:
        if self._node_owners[-1] != owner:
            self._node_starts.append(sequence_number)
            self._node_owners.append(owner)

    def _follow_nodes(self, owner: int) -> None:
        # Nodes are also made in the backward pass (recomputation, create_graph): they belong where their cause does.
        now = next_autograd_sequence_number()
        if now != self._last_sequence_number:
            self._own_nodes_from(self._last_sequence_number, owner)
            self._last_sequence_number = now

    def pack(self, tensor: torch.Tensor) -> int:
        """Hook for ``saved_tensors_hooks``: notes what autograd keeps, each storage once."""
        key = storage_key(tensor)
        origin = self._origins.get(key)
        if key not in self._saved and (origin is None or origin.counts_as_saved):
            self._saved.add(self._key(tensor))
            nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else tensor.nbytes
            self.segments[self._owner()].saved_activation_bytes += int(nbytes)
        self._packed.append(tensor)
        return len(self._packed) - 1

    def unpack(self, index: int) -> torch.Tensor:
        """Hook for ``saved_tensors_hooks``: gives back what ``pack`` took."""
        return self._packed[index]

    def release(self) -> None:
        """Lets go of every tensor, and with them of the fake module."""
        self._packed.clear()
        self._alive.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, argument in enumerate(args):
        yield from named_tensors(argument, str(index))
    for name, argument in kwargs.items():
        yield from named_tensors(argument, name)
