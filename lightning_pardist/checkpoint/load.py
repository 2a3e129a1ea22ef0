"""Loading: any kind of checkpoint into any layout, in place, agreed by all ranks before anything is overwritten."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist import torch_dtensor_api
from lightning_pardist.checkpoint import names, objects, refusals
from lightning_pardist.checkpoint.exchange import Exchange, ToAll
from lightning_pardist.checkpoint.manifest import Manifest
from lightning_pardist.checkpoint.pieces import Entry, entry_of
from lightning_pardist.checkpoint.restore import OptimizerRestore
from lightning_pardist.checkpoint.source import Source
from lightning_pardist.checkpoint.sources import ShardedSource, open_source
from lightning_pardist.checkpoint.state import (
    MODEL,
    TrainState,
    check_optimizers,
    give_back_gathered,
    named_group,
    parameter_names,
)
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.specs.checkpoint_options import CheckpointOptions


@dataclass(frozen=True)
class LoadRequest:
    """What to take from a checkpoint."""

    what: Literal["all", "weights"] = "all"
    """``weights`` leaves optimizers and this rank's own state alone: evaluation, or a start from other weights."""
    strict: bool = True
    """Names of the module and of the optimizers must agree with the checkpoint's. Shapes must in any case."""
    weights_only: bool = True
    """Load plain data only; pickled objects are refused by name."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Of this run, in the form given to the save: a rank's own state is restored on the same layout only."""
    rank_state: bool = False
    """This rank's own state even without the optimizers, for a run that loads those later."""
    prefix: str | None = ""
    """For safetensors: the part of the module's names before those in the file, as ``"model."``. None: the one under
    which most names correspond."""


@dataclass
class LoadReport:
    """What was loaded, and what was not."""

    path: str
    kind: str
    """Name of the kind of source."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Loops, callbacks, schedulers, hyperparameters, as they were given to the save."""
    rank_state: dict[str, Any] | None = None
    """This rank's own, if the layout is the one of the save."""
    same_layout: bool = False
    manifest: Manifest | None = None
    missing: list[str] = field(default_factory=list)
    """Names of the module that the checkpoint lacks; they keep their values."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the checkpoint that no rank's module has."""
    notes: list[str] = field(default_factory=list)
    """What else was not as saved."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Offer:
    """What a rank tells rank 0 before anything is read."""

    missing: list[str]
    used: set[str]
    stored: set[str]
    optimizer_used: list[set[str]]
    optimizer_stored: list[set[str]]
    optimizer_problem: str | None
    """Why the optimizers do not correspond; names of the module that differ would explain it, and are said first."""


def load_checkpoint(
    path: str,
    state: TrainState,
    request: LoadRequest | None = None,
    *,
    options: CheckpointOptions | None = None,
    control_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fills the live module and optimizers; every rank calls it, and reads what it holds and no more.

    Nothing is changed before all ranks have found their part in order. No autograd, no step: momentum that the live
    optimizer lacks is created as the optimizer would have.

    Args:
        path: folder or file, local or a URL: see ``open_source``.
        state: the live objects.
        request: what to take.
        options: verification, storage options, timeout.
        control_group: host group of all ranks; None in a run of one process.

    Raises:
        ValueError: on all ranks, if the checkpoint is of another model, or holds what ``weights_only`` forbids.
        FileNotFoundError, CorruptCheckpointError, CheckpointError: on all ranks.
    """
    started = time.monotonic()
    request, options = request or LoadRequest(), options or CheckpointOptions()
    exchange = Exchange(control_group, options.timeout_s)
    loading = _Loading(path, state, request, options)
    missing, unexpected = exchange.round("opening the checkpoint", loading.open, loading.decide)
    exchange.round("reading the checkpoint", loading.read, lambda _: ToAll(None))
    exchange.round("restoring the state", lambda: loading.apply(exchange), lambda _: ToAll(None))
    loading.report.missing, loading.report.unexpected = missing, unexpected
    loading.report.seconds = time.monotonic() - started
    return loading.report


def load_weights(
    path: str,
    module: torch.nn.Module,
    *,
    strict: bool = True,
    prefix: str = "",
    options: CheckpointOptions | None = None,
    control_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fills a module's weights from any kind of checkpoint: see ``load_checkpoint``."""
    request = LoadRequest(what="weights", strict=strict, prefix=prefix)
    return load_checkpoint(path, TrainState(module), request, options=options, control_group=control_group)


def read_rank_states(
    path: str, *, weights_only: bool = True, options: CheckpointOptions | None = None
) -> list[dict[str, Any] | None]:
    """Returns every rank's own state in a checkpoint, for a resume on another layout that merges them."""
    options = options or CheckpointOptions()
    source = ShardedSource(*open_storage(path, options.storage_options), verify=options.verify_on_load)
    files = [objects.rank_file(rank) for rank in range(source.manifest.world_size)]
    known = source.manifest.files
    return [source.unpack(name, weights_only=weights_only) if name in known else None for name in files]


class _Loading:
    """One rank's way through a load."""

    def __init__(self, path: str, state: TrainState, request: LoadRequest, options: CheckpointOptions) -> None:
        self.storage, self.path = open_storage(path, options.storage_options)
        self.state = state
        self.request = request
        self.options = options
        self.report = LoadReport(self.path, "")
        self.layers: list[dict[str, Entry]] = [{}]
        """What to read; a key comes once in each."""
        self.restores: list[OptimizerRestore] = []
        self.tensors: dict[str, Tensor] = {}

    def open(self) -> _Offer:
        """Finds what to read; changes nothing."""
        give_back_gathered(self.state.module)
        request, known = self.request, parameter_names(self.state)
        live = [
            [n for i, group in enumerate(optimizer.param_groups) for n in named_group(group, i, known)]
            for optimizer in self.state.optimizers
        ]
        self.source = open_source(
            self.storage,
            self.path,
            verify=self.options.verify_on_load,
            weights_only=request.weights_only,
            prefix=request.prefix,
            live=live,
            names=list(names.state_tensors(self.state.module)[0]) if request.prefix is None else (),
        )
        self.report.kind = type(self.source).__name__.removesuffix("Source")
        self.report.trainer = self.source.trainer(weights_only=request.weights_only)
        if isinstance(self.source, ShardedSource):
            self.report.manifest = self.source.manifest
            layout = json.loads(json.dumps(dict(request.layout), default=str))  # as the manifest has it
            self.report.same_layout = self.source.manifest.layout == layout
        missing, used = self._match_model()
        stored = {key for key in self.source.infos if key.startswith(MODEL)}
        optimizer_used: list[set[str]] = []
        optimizer_stored: list[set[str]] = []
        problem = None
        if request.what == "all":
            try:
                optimizer_used, optimizer_stored = self._match_optimizers()
            except ValueError as error:
                problem = str(error)
        self.source.check_content(self.layers[0])
        return _Offer(missing, used, stored, optimizer_used, optimizer_stored, problem)

    def decide(self, offers: list[_Offer]) -> ToAll[tuple[list[str], list[str]]]:
        """Rank 0: compares the checkpoint with what all ranks hold together."""
        missing = list(dict.fromkeys(name for offer in offers for name in offer.missing))
        used = set().union(*(offer.used for offer in offers))
        unexpected = sorted(key[len(MODEL) :] for key in offers[0].stored - used)
        if self.request.strict and (missing or unexpected):
            raise ValueError(refusals.names_differ(self.path, missing, unexpected))
        problems = [offer.optimizer_problem for offer in offers if offer.optimizer_problem]
        if problems:
            raise ValueError(problems[0])
        for index, stored in enumerate(offers[0].optimizer_stored):
            lost = stored.difference(*(offer.optimizer_used[index] for offer in offers))
            if lost and self.request.strict:
                raise ValueError(refusals.parameters_lost(self.path, index, sorted(lost)))
        return ToAll((missing, unexpected))

    def read(self) -> None:
        """Fills the tensors in place."""
        for layer in self.layers:
            self.source.read_into(layer)

    def apply(self, exchange: Exchange) -> None:
        """Hands over what is no tensor, and state that was read into new tensors."""
        module_objects = self.source.module_objects()
        live = {_address(t) for t in (*self.state.module.parameters(), *self.state.module.buffers())}
        if module_objects or any(_address(tensor) not in live for tensor in self.tensors.values()):
            # state_dict() gave copies (torchmetrics, an override): only load_state_dict() knows the way back.
            self.state.module.load_state_dict({**self._spelled(), **module_objects}, strict=False)
        for restore in self.restores:
            restore.apply()
            self.report.notes.extend(restore.notes)
        wants_own = self.request.what == "all" or self.request.rank_state
        if self.report.same_layout and isinstance(self.source, ShardedSource) and wants_own:
            name = objects.rank_file(exchange.rank)
            if name in self.source.manifest.files:
                self.report.rank_state = self.source.unpack(name, weights_only=self.request.weights_only)

    def _spelled(self) -> dict[str, Tensor]:
        """Returns the tensors under the names that this module's ``load_state_dict`` expects."""
        module = self.state.module
        clean = {name: names.clean_name(name, module) for name in module.state_dict()}
        return {name: self.tensors[own] for name, own in clean.items() if own in self.tensors}

    def _match_model(self) -> tuple[list[str], set[str]]:
        """Plans the module's tensors; returns the names that the checkpoint lacks, and its keys that are known here."""
        self.tensors, _ = names.state_tensors(self.state.module)
        ties = self.state.aliases()
        other_names = _other_names(ties, self.source.aliases)
        missing, used = [], set()
        self.tensors = {n: t for n, t in self.tensors.items() if not self.state.is_absent(n, ties)}
        for name, tensor in self.tensors.items():
            keys = [MODEL + n for n in (name, *other_names.get(name, ())) if MODEL + n in self.source.infos]
            used.update(keys)
            if not keys:
                missing.append(name)
                continue
            shape, _ = self.source.infos[keys[0]]
            if shape != tuple(tensor.shape):
                raise ValueError(refusals.shapes_differ(self.path, name, shape, tuple(tensor.shape)))
            if ties.get(name, name) == name or ties[name] not in self.tensors:
                self._want(keys[0], tensor)
        return missing, used

    def _want(self, key: str, tensor: Tensor) -> None:
        """A tensor that is stored once may be held twice, if the checkpoint's model ties what this one does not."""
        layer = next((layer for layer in self.layers if key not in layer), None)
        if layer is None:
            self.layers.append(layer := {})
        layer[key] = entry_of(key, tensor)

    def _match_optimizers(self) -> tuple[list[set[str]], list[set[str]]]:
        if not self.source.whole_run:
            raise ValueError(refusals.weights_only_source(self.path, self.report.kind))
        optimizers, saved = self.state.optimizers, self.source.optimizers()
        check_optimizers(optimizers)
        if len(optimizers) != len(saved):
            problem = f"{len(saved)} optimizers are saved, {len(optimizers)} are live"
            if self.request.strict:
                raise ValueError(refusals.other_optimizers(self.path, problem))
            self.report.notes.append(problem)
        aliases = _names_by_id(self.state, self.source)
        stored = []
        for index, (optimizer, content) in enumerate(zip(optimizers, saved)):
            restore = OptimizerRestore(
                index, optimizer, content, self.source.infos, aliases, self.request.strict, self.state.absent_ids()
            )
            self.restores.append(restore)
            self.layers[0].update(restore.wanted)
            stored.append({name for group in content["groups"] for name in group["params"]})
        return [restore.used for restore in self.restores], stored


def _other_names(*ties: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns for each tied name the other names of the same tensor, in the module or in the checkpoint."""
    together: dict[str, list[str]] = {}
    for tie in ties:
        for further, first in tie.items():
            joint = list(dict.fromkeys([first, further, *together.get(first, ()), *together.get(further, ())]))
            for name in joint:
                together[name] = joint
    return {name: [other for other in joint if other != name] for name, joint in together.items()}


def _names_by_id(state: TrainState, source: Source) -> dict[int, list[str]]:
    others = _other_names(state.aliases(), source.aliases)
    return {i: [name, *others.get(name, ())] for i, name in parameter_names(state).items()}


def _address(tensor: Tensor) -> int:
    return torch_dtensor_api.local_tensor(tensor.detach()).data_ptr()
