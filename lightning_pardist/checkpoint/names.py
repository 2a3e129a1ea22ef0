"""The names that a module's tensors have in one process, without any wrapper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch.compile, activation checkpointing and FSDP1 put into names: nobody else uses these words."""


def clean_name(name: str, root: nn.Module) -> str:
    """Returns ``name`` without the parts that wrappers add.

    ``module`` is an ordinary word, so it goes only where its owner is a (Distributed)DataParallel.
    """
    kept: list[str] = []
    owner: object = root
    for part in name.split("."):
        wrapped = part == "module" and isinstance(owner, (DistributedDataParallel, DataParallel))
        if part not in _WRAPPER_PARTS and not wrapped:
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def without_wrappers(name: str) -> str:
    """Returns a name from a file, of whose module nothing is known, without the words that only wrappers use."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every name of every parameter; one that is tied comes once per name, its first name first."""
    for name, parameter in root.named_parameters(remove_duplicate=False):
        yield clean_name(name, root), parameter


def ties(root: nn.Module, across_ranks: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns ``{further name: first name}`` for every tied parameter.

    Args:
        root: the module; parameters that are one object here are tied.
        across_ranks: the same for ties whose two ends live on different ranks (embedding and head of a pipeline).
    """
    first: dict[int, str] = {}
    aliases = dict(across_ranks or {})
    for name, parameter in named_parameters(root):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = aliases.get(canonical, canonical)
    return aliases


def state_tensors(root: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns what ``state_dict()`` holds under clean names: tensors (sharing memory) and other objects."""
    return split_state(root.state_dict(), root)


def split_state(state: Mapping[str, object], root: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Returns a state dict under clean names, as tensors and as other objects (``_extra_state``)."""
    tensors: dict[str, Tensor] = {}
    objects: dict[str, object] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[clean_name(name, root)] = value
        else:
            objects[clean_name(name, root)] = value
    return tensors, objects
