"""Which parameters and which outputs of blocks every part of a step is computed from, seen on one fake run.

[Note: what crosses a cut] A pipeline stage runs the whole step's code up to its last block; blocks of earlier stages
give back what was received of their outputs. So a value after a cut comes from one of two places: it is an output of a
block, which is sent; or code outside of blocks makes it, which runs again, with its parameters on this stage too. The
run below notes, operator by operator, from which of these every block's inputs and the code after the last block come.
Storages, not tensors, are followed: views hold what their storage holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_pardist.base.nested import map_leaves, tensors_in, tensors_of
from lightning_pardist.base.torch_api import (
    TorchDispatchMode,
    argument_named,
    current_autograd_node,
    storage_key,
    written_arguments,
)
from lightning_pardist.specs.pipeline_plan import Dataflow, Leaf, Needs, Outputs, Value

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


@dataclass
class _Node:
    """What is known of one storage's content."""

    kind: Literal["outside", "inside", "value"]
    block: int = -1
    """Of ``inside`` and ``value``."""
    sources: set[int] = field(default_factory=set)
    """Of ``outside``: nodes that it is computed from."""
    parameters: set[str] = field(default_factory=set)
    leaves: list[int] = field(default_factory=list)
    """Of ``value``: the output leaves that this storage holds."""


class AllSeen(BaseException):
    """Ends a run that has shown what was asked for. A BaseException: user code catches exceptions."""


class FlowRecorder(TorchDispatchMode):
    """The notes of one forward pass."""

    def __init__(self, module: nn.Module, blocks: Sequence[str], *, only_outputs: bool) -> None:
        super().__init__()
        self.outputs: dict[int, Outputs] = {}
        self.opaque: dict[int, str] = {}
        self.calls = [0] * len(blocks)
        self._order: list[int] = []
        self.finished = False
        """The step's own code has run to its end."""
        self._blocks = list(blocks)
        self._only_outputs = only_outputs
        self._open: int | None = None
        self._next = 0
        """The block that code outside comes before; after the last block, the number of blocks."""
        self._nodes: list[_Node] = []
        self._current: dict[int, int] = {}
        self._alive: list[Any] = []
        self._parameters = {self._key(p): name for name, p in module.named_parameters()}
        self._buffers = {self._key(b): name for name, b in module.named_buffers()}
        self._roots: list[set[int]] = [set() for _ in range(len(blocks) + 1)]
        self._used: list[dict[str, None]] = [{} for _ in range(len(blocks) + 1)]
        self._written: dict[str, int] = {}
        self._rewritten: dict[Value, None] = {}
        self._random = False
        self._inputs: list[tuple[int, Any]] = []

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Records in this context; hooks stay on the fake ``module``, which is thrown away."""
        named = dict(module.named_modules())
        for index, name in enumerate(self._blocks):
            named[name].register_forward_pre_hook(self._entering(index), prepend=True, with_kwargs=True)
            named[name].register_forward_hook(self._leaving(index), with_kwargs=True)
        with self:
            yield

    def needed_after_all(self, value: Any) -> None:
        """Notes a value that leaves the step: what it returns or logs."""
        for tensor in tensors_of(value):
            self._read(tensor, len(self._blocks))

    # ---- calls of blocks

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if current_autograd_node() is not None:  # recomputed in the backward pass
                return
            self.calls[index] += 1
            if self.calls[index] == 1:
                self._order.append(index)
            self._open = index
            self._inputs = [(storage_key(t), _geometry(t)) for t in tensors_of((args, kwargs))]

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if current_autograd_node() is not None:
                return
            self._open = None
            self._next = max(self._next, index + 1)
            if self.calls[index] == 1:
                self._note_outputs(index, output)
            if self._only_outputs and self._next == len(self._blocks):
                raise AllSeen

        return hook

    def _note_outputs(self, block: int, output: Any) -> None:
        found: list[Leaf] = []
        first: dict[tuple[int, Any], int] = {}
        values: dict[int, int] = {}

        def note(item: Any) -> Any:
            if not isinstance(item, Tensor):
                if not isinstance(item, _PLAIN):
                    self.opaque.setdefault(block, type(item).__name__)
                return item
            index, key = len(found), (storage_key(item), _geometry(item))
            same = first.setdefault(key, index)
            own = self._node_of(item)
            passes = None
            if own is None or own.kind != "inside" or own.block != block:
                passes = next((i for i, known in enumerate(self._inputs) if known == key), None)
            elif same == index:
                values.setdefault(key[0], self._value(block, item))
            if key[0] in values and same == index:
                self._nodes[values[key[0]]].leaves.append(index)
            found.append(
                Leaf(
                    index,
                    tuple(item.shape),
                    item.dtype,
                    item.requires_grad,
                    passes,
                    same if same != index and passes is None else None,
                )
            )
            return found[-1]

        self.outputs[block] = Outputs(map_leaves(note, output), tuple(found))

    def _value(self, block: int, tensor: Tensor) -> int:
        self._nodes.append(_Node("value", block))
        self._current[self._key(tensor)] = len(self._nodes) - 1
        return len(self._nodes) - 1

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if current_autograd_node() is None and not self._only_outputs:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._random = self._random or _draws_random(func, args, kwargs)
        target = self._next if self._open is None else self._open
        is_after = self._open is None and self._next == len(self._blocks)
        reads: set[int] = set()
        parameters: set[str] = set()
        for tensor in tensors_in((args, kwargs)):
            key = storage_key(tensor)
            if key in self._parameters:
                parameters.add(self._parameters[key])
            elif key in self._current:
                reads.add(self._current[key])
        if self._open is not None or is_after:
            self._used[target].update(dict.fromkeys(sorted(parameters)))
            self._roots[target].update(n for n in reads if not self._is_own(n, target))
        for tensor in tensors_in(written_arguments(func, args, kwargs) if hasattr(func, "_schema") else ()):
            name = self._buffers.get(storage_key(tensor))
            if name is not None:
                self._written[name] = target
            node = self._node_of(tensor)
            if node is not None and node.kind == "value" and self._open is None:
                self._rewritten.update(dict.fromkeys((node.block, leaf) for leaf in node.leaves))
            self._make(tensor, reads, parameters)
        # A view of what no part of the step has made (a buffer, the batch) is nobody's.
        given = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            key = storage_key(tensor)
            if key not in given and key not in self._current and key not in self._parameters:
                self._make(tensor, reads, parameters)

    def _is_own(self, node: int, block: int) -> bool:
        return self._nodes[node].kind == "inside" and self._nodes[node].block == block

    def _make(self, tensor: Tensor, reads: set[int], parameters: set[str]) -> None:
        if storage_key(tensor) in self._parameters:
            return
        if self._open is not None:
            node = _Node("inside", self._open)
        else:
            node = _Node("outside", sources=set(reads), parameters=set(parameters))
        self._nodes.append(node)
        self._current[self._key(tensor)] = len(self._nodes) - 1

    def _node_of(self, tensor: Tensor) -> _Node | None:
        index = self._current.get(storage_key(tensor))
        return None if index is None else self._nodes[index]

    def _read(self, tensor: Tensor, target: int) -> None:
        key = storage_key(tensor)
        if key in self._parameters:
            self._used[target][self._parameters[key]] = None
        elif key in self._current:
            self._roots[target].add(self._current[key])

    def _key(self, tensor: Tensor) -> int:
        # A storage's number must not be given to another one.
        self._alive.append(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)
        return storage_key(tensor)

    # ---- the answer

    def dataflow(self) -> Dataflow:
        """Returns what was seen."""
        count = len(self._blocks)
        return Dataflow(
            blocks=tuple(self._blocks),
            order=tuple(self._order),
            needs=tuple(self._needs(target) for target in range(count + 1)),
            used_parameters=tuple(tuple(self._used[block]) for block in range(count)),
            calls=tuple(self.calls),
            opaque=tuple(self.opaque.get(block) for block in range(count)),
            written_buffers=tuple(self._written.items()),
            rewritten=tuple(sorted(self._rewritten)),
            draws_random=self._random,
        )

    def _needs(self, target: int) -> Needs:
        parameters: dict[str, None] = {}
        if target == len(self._blocks):
            parameters.update(self._used[target])
        values: dict[Value, None] = {}
        insides: dict[int, None] = {}
        waiting, seen = sorted(self._roots[target]), set()
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            node = self._nodes[index]
            if node.kind == "value":
                values.update(dict.fromkeys((node.block, leaf) for leaf in node.leaves))
            elif node.kind == "inside":
                insides[node.block] = None
            else:
                parameters.update(dict.fromkeys(sorted(node.parameters)))
                waiting.extend(node.sources)
        return Needs(parameters=tuple(parameters), values=tuple(sorted(values)), insides=tuple(sorted(insides)))

    def release(self) -> None:
        """Lets go of every tensor."""
        self._alive.clear()


def _draws_random(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    # Attention is tagged whether it drops anything or not.
    rate = argument_named(func, "dropout_p", args, kwargs)
    return rate is None or rate > 0


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)
