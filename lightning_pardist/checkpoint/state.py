"""What goes into a checkpoint: read from the live module and optimizers without touching them.

Nothing here calls an optimizer's ``state_dict`` or torch's ``get_optimizer_state_dict``: the latter creates state in an
optimizer that has not stepped, and drops what belongs to frozen parameters. ``optimizer.state`` is only looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist import torch_dist_api, torch_dtensor_api
from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint import names
from lightning_pardist.checkpoint.pieces import Entry, entry_of

MODEL = "model."
OPTIMIZER = "optim."


@dataclass
class TrainState:
    """The live objects of a run. A rank may hold a part of them (its pipeline stage); together the ranks hold all."""

    module: nn.Module
    """Its parameters are plain, or DTensors of any layout."""
    optimizers: Sequence[Optimizer] = ()
    """Plain torch optimizers over parameters of the module."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Loops, callbacks, schedulers, hyperparameters: equal on all ranks, rank 0's is written. Used by saves only."""
    rank_state: Mapping[str, Any] | None = None
    """What differs between ranks: generator states, positions in the data. Used by saves only."""
    model_state: Mapping[str, Any] | None = None
    """Replaces ``module.state_dict()`` in a save, where a hook of the user has edited it."""
    ties_across_ranks: Mapping[str, str] = field(default_factory=dict)
    """``{further name: first name}`` for tied parameters whose two ends live on different ranks."""
    parameter_order: Sequence[str] | None = None
    """All parameter names in the order of the module in one process; needed only where no rank holds all of it."""
    absent_parameters: frozenset[str] = frozenset()
    """First names of parameters that are in the module and hold nothing, for another rank has them."""
    foreign_buffers: frozenset[str] = frozenset()
    """Names of buffers that another rank keeps up to date; it saves them."""

    def is_absent(self, name: str, aliases: Mapping[str, str]) -> bool:
        """Returns True for a name of a parameter that another rank has."""
        return aliases.get(name, name) in self.absent_parameters

    def absent_ids(self) -> frozenset[int]:
        """Returns the ids of the parameters that another rank has."""
        named = names.named_parameters(self.module) if self.absent_parameters else ()
        return frozenset(id(parameter) for name, parameter in named if name in self.absent_parameters)

    def aliases(self) -> dict[str, str]:
        """Returns ``{further name: first name}`` for every tied parameter."""
        return names.ties(self.module, self.ties_across_ranks)


@dataclass
class Snapshot:
    """What this rank contributes. Tensors are views into the live ones until they are staged or written."""

    entries: list[Entry]
    """Tensors, named as in the file: ``model.<name>``, ``optim.<optimizer>.<parameter name>.<state key>``."""
    optimizers: list[dict[str, Any]]
    """Per optimizer ``class``, ``groups`` (``params`` by name, ``options``), ``values`` (state that is no tensor)."""
    module_objects: dict[str, Any]
    """What ``state_dict()`` holds besides tensors."""
    aliases: dict[str, str]


def take_snapshot(state: TrainState) -> Snapshot:
    """Returns this rank's part of the run's state; no collective, no side effect.

    Raises:
        ValueError: if an optimizer keeps state in a form that cannot be stored by parameter name.
    """
    give_back_gathered(state.module)
    aliases = state.aliases()
    entries, objects = _model_entries(state, aliases)
    optimizers = []
    for index, optimizer in enumerate(state.optimizers):
        saved, optimizer_entries = _optimizer_snapshot(index, optimizer, parameter_names(state))
        optimizers.append(saved)
        entries.extend(optimizer_entries)
    return Snapshot(entries, optimizers, objects, aliases)


def give_back_gathered(module: nn.Module) -> None:
    """Makes the module show its shards where FSDP has left whole parameters for the backward or for the next step.

    They are copies; the next forward gathers them again. Gradients that are summed up in them stay.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule) and torch_dist_api.is_gathered(child):
            child.reshard()


def parameter_names(state: TrainState) -> dict[int, str]:
    """Returns ``{id(parameter): first name}``."""
    aliases = state.aliases()
    return {id(parameter): aliases.get(name, name) for name, parameter in names.named_parameters(state.module)}


def named_group(group: Mapping[str, Any], group_index: int, known: Mapping[int, str]) -> list[str]:
    """Returns the names of a group's parameters; one that is not the module's is named by its place."""
    return [known.get(id(p), f"@{group_index}.{i}") for i, p in enumerate(group["params"])]


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers whose state does not lie in ``state`` and ``param_groups``.

    Raises:
        ValueError: names the optimizer. Cheap: call it at the start of a run rather than at its first save.
    """
    for index, optimizer in enumerate(optimizers):
        if type(optimizer).state_dict is not Optimizer.state_dict:
            raise ValueError(
                message(
                    "An optimizer's state must lie in `state` and `param_groups` to be kept by parameter name.",
                    got=f"optimizer {index} is a {_class_name(optimizer)}, which has a state_dict of its own",
                    source="configure_optimizers()",
                    change="use an optimizer that inherits state_dict from torch.optim.Optimizer",
                )
            )


def _model_entries(state: TrainState, aliases: Mapping[str, str]) -> tuple[list[Entry], dict[str, Any]]:
    if state.model_state is None:
        tensors, objects = names.state_tensors(state.module)
    else:
        tensors, objects = names.split_state(state.model_state, state.module)
    parameters = {name for name, _ in names.named_parameters(state.module)}
    entries = []
    for name, tensor in tensors.items():
        canonical = aliases.get(name, name)
        if state.is_absent(name, aliases) or name in state.foreign_buffers:
            continue
        if canonical == name or canonical not in tensors:
            entries.append(entry_of(MODEL + canonical, tensor, lowest_rank_writes=name not in parameters))
    return entries, objects


def _optimizer_snapshot(
    index: int, optimizer: Optimizer, known: Mapping[int, str]
) -> tuple[dict[str, Any], list[Entry]]:
    check_optimizers([optimizer])
    entries: list[Entry] = []
    groups: list[dict[str, Any]] = []
    values: dict[str, dict[str, Any]] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        group_names = named_group(group, group_index, known)
        groups.append({"params": group_names, "options": {k: v for k, v in group.items() if k != "params"}})
        for name, parameter in zip(group_names, group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                where = f"state {key!r} of parameter {name} in optimizer {index} ({_class_name(optimizer)})"
                _check_state(where, key, value, parameter)
                if isinstance(value, Tensor):
                    entries.append(entry_of(f"{OPTIMIZER}{index}.{name}.{key}", value))
                else:
                    values.setdefault(name, {})[key] = value
    return {"class": _class_name(optimizer), "groups": groups, "values": values}, entries


def _check_state(where: str, key: object, value: object, parameter: Tensor) -> None:
    problem = None
    if not isinstance(key, str) or "." in key:
        problem = "its key is not a word"
    elif isinstance(value, Tensor):
        if _is_local_shard(value, parameter):
            problem = "it is a plain tensor of this rank's part only, so the other ranks' parts cannot be told apart"
    elif isinstance(parameter, DTensor) and any(True for _ in tensors_within(value)):
        problem = "it keeps tensors inside a container while the parameter is sharded"
    if problem:
        raise ValueError(
            message(
                "Optimizer state must be tensors of the parameter's layout, or plain values.",
                got=f"{where}: {problem}",
                source="configure_optimizers()",
                change="use an optimizer whose state follows its parameters (AdamW, SGD, Adafactor, ...), "
                "or a layout that does not shard parameters",
            )
        )


def _is_local_shard(value: Tensor, parameter: Tensor) -> bool:
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.dim() == 0:
        return False
    local = torch_dtensor_api.local_tensor(parameter)
    return value.shape == local.shape and value.shape != parameter.shape


def tensors_within(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors inside dicts, lists and tuples, with where they are."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_within(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from tensors_within(inner, f"{path}[{index}]")


def refuse_sharded(what: str, value: object) -> None:
    """Refuses sharded tensors where only one rank's copy is written.

    Raises:
        ValueError: names the place.
    """
    for path, tensor in tensors_within(value):
        if isinstance(tensor, DTensor):
            raise ValueError(
                message(
                    f"The {what} state is written by one rank, so it must not hold sharded tensors.",
                    got=f"a DTensor at {path or 'the top'}",
                    source="a state_dict() of a callback or hook",
                    change="keep it in a buffer or parameter of the module, or return full_tensor() from state_dict()",
                )
            )


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
