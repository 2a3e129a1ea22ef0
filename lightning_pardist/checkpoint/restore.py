"""Optimizer state back into a live optimizer: created where absent in the parameter's layout, options by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_pardist.base.errors import message
from lightning_pardist.checkpoint.pieces import Entry, entry_of
from lightning_pardist.checkpoint.source import Info
from lightning_pardist.checkpoint.state import OPTIMIZER, named_group


class OptimizerRestore:
    """One optimizer's way back: made before anything is read, applied after all ranks have read.

    Args:
        index: the optimizer's place among the run's optimizers.
        optimizer: the live one.
        saved: its ``class``, ``groups`` and ``values`` in the checkpoint.
        infos: the checkpoint's tensors.
        aliases: ``{id(live parameter): its names, first one first}``.
        strict: whether parameters and groups must correspond.
        absent: ids of parameters whose state another rank has.
    """

    def __init__(
        self,
        index: int,
        optimizer: Optimizer,
        saved: Mapping[str, Any],
        infos: Mapping[str, Info],
        aliases: Mapping[int, Sequence[str]],
        strict: bool,
        absent: Collection[int] = (),
    ) -> None:
        self.optimizer = optimizer
        self.strict = strict
        self.wanted: dict[str, Entry] = {}
        """What is to be read, under the checkpoint's keys."""
        self.notes: list[str] = []
        self.used: set[str] = set()
        """Names of the checkpoint's parameters that were found in the live optimizer."""
        self._where = f"optimizer {index} ({type(optimizer).__name__})"
        self._saved_group = {name: i for i, group in enumerate(saved["groups"]) for name in group["params"]}
        self._saved = saved
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        keys = _keys_by_name(f"{OPTIMIZER}{index}.", infos)
        first = {i: names[0] for i, names in aliases.items()}
        for group_index, group in enumerate(optimizer.param_groups):
            found: list[str] = []
            for name, parameter in zip(named_group(group, group_index, first), group["params"]):
                candidates = aliases.get(id(parameter), (name,))
                stored = next((candidate for candidate in candidates if candidate in self._saved_group), None)
                if stored is None:
                    self._new_parameter(name)
                    continue
                found.append(stored)
                if id(parameter) in absent:
                    continue
                prefix = f"{OPTIMIZER}{index}.{stored}."
                self._plan_state(
                    parameter, group, {key: (prefix + key, infos[prefix + key]) for key in keys.get(stored, ())}
                )
                self._states[-1][1].update(saved["values"].get(stored, {}))
            self.used.update(found)
            self._plan_options(group_index, group, found)

    def apply(self) -> None:
        """Puts state and options into the optimizer. Groups stay the same objects: schedulers hold on to them."""
        for parameter, state in self._states:
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)
        for group, options in self._options:
            for key, value in options.items():
                if isinstance(group.get(key), Tensor) and key != "params":
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _plan_state(self, parameter: Tensor, group: Mapping[str, Any], stored: Mapping[str, tuple[str, Info]]) -> None:
        live = self.optimizer.state.get(parameter, {})
        state: dict[str, Any] = {}
        for key, (source_key, (shape, dtype)) in stored.items():
            tensor = live.get(key)
            if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                tensor = _new_state(parameter, shape, dtype, group)
            state[key] = tensor
            self.wanted[source_key] = entry_of(source_key, tensor)
        self._states.append((parameter, state))

    def _plan_options(self, index: int, group: dict[str, Any], found: list[str]) -> None:
        groups = self._saved["groups"]
        homes = {self._saved_group[name]: name for name in found}
        if len(homes) > 1:
            places = ", ".join(f"{name} in saved group {home}" for home, name in sorted(homes.items()))
            self._mismatch(f"group {index} joins {places}")
        if homes:
            counts = [self._saved_group[name] for name in found]
            self._options.append((group, groups[max(homes, key=counts.count)]["options"]))
        elif not group["params"] and index < len(groups) and len(groups) == len(self.optimizer.param_groups):
            # An empty group (or one of another pipeline stage) has only its place to be known by.
            self._options.append((group, groups[index]["options"]))
        else:
            self._mismatch(f"no parameter of group {index} is in the checkpoint")

    def _new_parameter(self, name: str) -> None:
        self._mismatch(f"{name} has no place in the checkpoint's groups")

    def _mismatch(self, problem: str) -> None:
        if not self.strict:
            self.notes.append(f"{self._where}: {problem}; its live options and state are kept")
            return
        raise ValueError(
            message(
                "The optimizer must have the parameters and groups that it had when the checkpoint was saved.",
                got=f"{self._where}: {problem}",
                source="configure_optimizers() and the checkpoint",
                change="build the same groups, or load with strict=False to keep what does not correspond as it is",
            )
        )


def _keys_by_name(prefix: str, infos: Mapping[str, Info]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for key in infos:
        if key.startswith(prefix):
            name, _, state_key = key[len(prefix) :].rpartition(".")
            out.setdefault(name, []).append(state_key)
    return out


def _new_state(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    """Returns memory for a state tensor as the optimizer itself would have placed it."""
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
    if not shape:
        # torch keeps step counts on the host, unless the step itself must run on the device.
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=dtype, device=parameter.device if on_device else "cpu")
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    # Row and column statistics: sharded along where they run along the parameter, whole elsewhere.
    placements = [
        placement
        if (dim := getattr(placement, "dim", None)) is not None
        and len(shape) == parameter.dim()
        and shape[dim] == parameter.shape[dim]
        else Replicate()
        for placement in parameter.placements
    ]
    return torch.distributed.tensor.empty(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
