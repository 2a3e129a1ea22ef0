"""Every private torch name we rely on that needs no process group, in one place (torch 2.11 to 2.13).

Each has a public meaning that torch documents or uses in its own public tools; the name is private all the same, so a
new torch release is checked here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "CUDNN_RNN",
    "CUDNN_RNN_BACKWARD",
    "GROUPED_MM",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "argument_named",
    "as_plain_tensors",
    "checkpoints_without_reentry",
    "current_autograd_node",
    "has_step_post_hooks",
    "next_autograd_sequence_number",
    "node_sequence_number",
    "own_buffers",
    "storage_key",
    "tree_flatten",
    "tree_unflatten",
    "under_dispatch_mode",
    "version_counter",
    "without_dispatch_modes",
    "without_function_modes",
    "wrapper_tensor",
    "written_arguments",
]

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
GROUPED_MM = torch.ops.aten._grouped_mm
CUDNN_RNN = torch.ops.aten._cudnn_rnn
CUDNN_RNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward


def written_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns those arguments of a call that the operator writes to (``add_``, ``out=``); none for most operators."""
    schema = operator._schema
    if not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def argument_named(operator: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
    """Returns the argument of a call that the operator's schema calls ``name``, its default if left out, else None."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def has_step_post_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if somebody asked to be called after the optimizer's steps; torch tells in private names only."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that two live tensors share if, and only if, they share storage (fake tensors too)."""
    try:
        return torch._C._storage_id(tensor)  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # no storage, such as a sparse tensor
        return id(tensor)


def current_autograd_node() -> Node | None:
    """Returns the autograd node whose backward is running on this thread, or None in the forward pass."""
    return torch._C._current_autograd_node()


def next_autograd_sequence_number() -> int:
    """Returns the number the next autograd node of this thread will get; they grow in the order of the forward pass."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def node_sequence_number(node: Node) -> int:
    """Returns the number an autograd node got when the forward pass made it."""
    return node._sequence_nr()


def version_counter(tensor: torch.Tensor) -> int:
    """Returns a number that grows whenever the tensor is written to."""
    return tensor._version


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the live table of a module's own buffers; writing to it replaces buffers without any check."""
    return module._buffers


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Returns a context in which operators run for real, whatever dispatch modes are active."""
    return _disable_current_modes()


def under_dispatch_mode() -> bool:
    """Returns whether a dispatch mode sees every operator now, as that of selective recomputation does."""
    return bool(torch._C._len_torch_dispatch_stack())


def wrapper_tensor(cls: type[Any], shape: Sequence[int], like: torch.Tensor) -> Any:
    """Returns a tensor of a subclass that has a shape but no memory of its own; torch's tutorials use this name."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=False)


def as_plain_tensors() -> AbstractContextManager[object]:
    """Returns a context in which tensor subclasses do not see calls of torch functions; function modes still do."""
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> AbstractContextManager[object]:
    """Returns a context in which no function mode sees calls of torch functions, such as those of our own hooks."""
    return torch._C.DisableTorchFunction()


@contextmanager
def checkpoints_without_reentry(noticed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Runs ``checkpoint(use_reentrant=True)`` as the other kind, with the same numbers.

    The reentrant kind hides its gradient graph until the backward pass and refuses ``autograd.grad``: a pipeline stage
    could neither send what is made inside nor take the halves of a backward pass apart.

    Args:
        noticed: called whenever a checkpoint of either kind begins.
    """
    reentrant, other = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator

    def watched(*args: Any, **kwargs: Any) -> Any:
        noticed()
        return other(*args, **kwargs)

    # Both are looked up at every call.
    torch_checkpoint.CheckpointFunction = _NotReentrant  # type: ignore[misc, assignment]
    torch_checkpoint._checkpoint_without_reentrant_generator = watched
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]
        torch_checkpoint._checkpoint_without_reentrant_generator = other


class _NotReentrant:
    """Called as ``CheckpointFunction`` is."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # there the reentrant kind gives no gradient to anything, weights included
                return function(*args)
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
