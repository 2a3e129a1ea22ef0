"""Loading through Lightning's hooks: weights, optimizers, loops, random numbers and the position in the data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.strategies import lightning_api, lightning_data_api, position, resume
from lightning_pardist.strategies.live_run import LiveRun

log = get_logger(__name__)

OURS = "pardist_resume"
"""Key of what we keep beside Lightning's own entries."""


@dataclass
class _Resumed:
    """What a load has left to do until training goes on."""

    report: ckpt.LoadReport
    ours: Mapping[str, Any]
    waits_for_groups: bool
    """Optimizer state is loaded once a finetuning callback has rebuilt the groups."""
    in_epoch: bool = False
    at_last_batch: bool = False
    """The epoch counts as running, and Lightning goes on with the next."""
    loader_states: list[Any] = field(default_factory=list)
    """Of the training loaders, if they begin a new epoch."""
    move: position.Move | None = None
    """Set if the position in the data was saved on another layout."""


class Restorer:
    """Loads the checkpoints of one strategy; every method is called by every rank."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._given: dict[str, Any] = {}
        self._resumed: _Resumed | None = None

    def forget(self) -> None:
        """Drops what an earlier load has left to do."""
        self._resumed = None

    def load(self, path: str, *, fitting: bool) -> dict[str, Any]:
        """Fills module and optimizers in place; returns the rest in the form in which Lightning expects it.

        Every rank calls it; rank 0's path counts.
        """
        path = gather_objects(str(path), self._run.meshes())[0]
        unfreezes = fitting and any(isinstance(c, BaseFinetuning) for c in lightning_api.callbacks(self._run.trainer()))
        # A finetuning callback rebuilds the optimizers' groups when it is restored; their state can only follow then.
        report = self._load_with_fallback(path, resumes=fitting, waits_for_groups=unfreezes)
        if not report.trainer:
            if fitting:
                log.warning("%s holds weights only: optimizers, schedulers and loops start anew", report.path)
            nothing: dict[str, Any] = {"lr_schedulers": [], "optimizer_states": []}
            return {"pytorch-lightning_version": lightning_api.VERSION, **nothing, "state_dict": self._give_weights()}
        content = dict(report.trainer)
        ours = content.pop(OURS, {})
        if fitting:
            self._resumed = _Resumed(report, ours, waits_for_groups=unfreezes)
            lightning_data_api.prepare_training_data_again(self._run.trainer())
            if "loops" in content:
                position.count_running_epoch(content["loops"])
                self._resumed.in_epoch = position.in_epoch(content["loops"])
                self._resumed.at_last_batch = position.at_last_batch(content["loops"])
                self._restore_position(content["loops"], ours.get("data"), report)
        content["state_dict"] = self._give_weights()
        if "lr_schedulers" in content:
            content["optimizer_states"] = []  # filled in place already, or by load_optimizers
        return content

    def _give_weights(self) -> dict[str, Any]:
        """Returns the weights that were loaded, if the user's hook edits them or a callback averages with them."""
        edits = lightning_api.overrides(self._run.live(), "on_load_checkpoint")
        edits |= any(isinstance(c, WeightAveraging) for c in lightning_api.callbacks(self._run.trainer()))
        self._given = dict(self._run.live().state_dict()) if edits else {}
        return dict(self._given)

    def load_edited_weights(self, content: Mapping[str, Any]) -> None:
        """Takes over what ``on_load_checkpoint`` of the user's module has put into ``state_dict``."""
        changed = {k: v for k, v in content.get("state_dict", {}).items() if v is not self._given.get(k)}
        live = self._run.live().state_dict(keep_vars=True)
        elsewhere = frozenset() if self._run.model is None else self._run.model.absent
        with torch.no_grad():
            for name, value in changed.items():
                if name in live and name not in elsewhere:
                    _copy_into(live[name], value)
        self._given = {}

    def load_optimizers(self, trainer: Trainer) -> None:
        """Restores optimizer state that had to wait for the groups of a finetuning callback."""
        resumed = self._resumed
        if resumed is None or not resumed.waits_for_groups:
            return
        for callback in lightning_api.callbacks(trainer):
            if isinstance(callback, BaseFinetuning):
                callback.on_fit_start(trainer, self._run.live())
        trainable = resumed.ours.get("trainable")
        # A file of plain Lightning does not say: what optimizers hold trains, and the callback has frozen the rest.
        held = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
        for name, parameter in self._run.live().named_parameters():
            if trainable is not None or id(parameter) in held:
                parameter.requires_grad_(trainable is None or name in trainable)
        self._load(resumed.report.path, "all")

    def continued(self, loader: Any, trainer: Trainer, *, rank: int) -> Any:
        """Returns a training loader that goes on where the checkpoint was.

        Before an epoch starts from its beginning the generators are set back: drawing its order is part of it. A module
        that asks for ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` has loaders prepared before the
        run is attached and a checkpoint loaded; ``load`` has them prepared again.
        """
        if hasattr(loader, "state_dict") and sized_len(loader) is None:
            loader = position.ReadAhead(loader, lambda: lightning_data_api.batches_read_ahead(trainer))
        resumed, step = self._resumed, trainer.global_step
        if resumed is None:
            return loader
        # Lightning tells it later, when a loader with workers has begun to read, and one with a state has skipped.
        lightning_data_api.set_sampler_epoch(loader, self._run.epoch() + resumed.at_last_batch)
        if not resumed.in_epoch:
            state = resumed.loader_states.pop(0) if hasattr(loader, "state_dict") and resumed.loader_states else None
            return position.next_epoch(loader, state, lambda: self._restore_generators(resumed, rank, step))
        if resumed.move is not None:
            loader = resumed.move.apply(loader)
            _set_batches_done(trainer, resumed.move.done)
            if resumed.move.offset is not None:
                self._run.offset = (self._run.epoch(), resumed.move.offset)
        return loader

    def before_first_batch(self, *, rank: int, step: int) -> None:
        """Sets the generators back in the middle of an epoch, whose order was drawn before; ends the resume."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.in_epoch:
            self._restore_generators(resumed, rank, step)

    def _restore_generators(self, resumed: _Resumed, rank: int, step: int) -> None:
        own = resumed.report.rank_state
        if own is not None and own.get("generators"):
            resume.restore_generators(own["generators"])
        elif resumed.ours.get("seed") is not None:
            resume.reseed(int(resumed.ours["seed"]), step, rank)

    def _load_with_fallback(self, path: str, *, resumes: bool, waits_for_groups: bool) -> ckpt.LoadReport:
        """Loads the checkpoint, or with ``ckpt_path="last"`` the newest one before it that is whole."""

        def load(candidate: str) -> ckpt.LoadReport:
            whole = resumes and not waits_for_groups and self._holds_optimizers(candidate)
            return self._load(candidate, "all" if whole else "weights")

        try:
            return load(path)
        except ckpt.CorruptCheckpointError as error:
            if self._run.asked.ckpt_path != "last":
                raise
            damage: ckpt.CorruptCheckpointError = error
        for other in gather_objects(self._others(path), self._run.meshes())[0]:
            log.warning("%s\nckpt_path='last' goes on with the complete checkpoint before it: %s", damage, other)
            try:
                return load(other)
            except ckpt.CorruptCheckpointError as error:
                damage = error
        raise damage

    def _holds_optimizers(self, path: str) -> bool:
        """Rank 0 looks whether a run can be resumed, or only weights be used."""
        found: bool | Exception = False
        if self._run.is_first():
            try:
                found = ckpt.holds_optimizers(path, self._run.options, weights_only=self._weights_only())
            except Exception as error:  # all ranks must hear of it
                found = error
        answer = gather_objects(found, self._run.meshes())[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _others(self, path: str) -> list[str]:
        if not self._run.is_first():
            return []
        storage, target = open_storage(path, self._run.options.storage_options)
        if storage.renames_atomically:
            target = os.path.realpath(target)
        found = ckpt.complete_checkpoints(storage.split(target)[0], self._run.options.storage_options)
        return [other for other in found if target not in (other, os.path.realpath(other))]

    def _load(self, path: str, what: Any) -> ckpt.LoadReport:
        assert self._run.model is not None
        state = ckpt.TrainState(
            self._run.model.module,
            self._run.optimizers if what == "all" else (),
            absent_parameters=self._run.model.absent,
        )
        request = ckpt.LoadRequest(
            what=what,
            strict=self._run.live().strict_loading,
            weights_only=self._weights_only(),
            layout=self._run.layout(),
            rank_state=self._run.trainer().state.fn == TrainerFn.FITTING,
            prefix=None,
        )
        meshes = self._run.meshes()
        report = ckpt.load_checkpoint(
            path, state, request, options=self._run.options, control_group=None if meshes is None else meshes.control
        )
        if report.missing or report.unexpected:
            log.warning("%s: missing %s, unexpected %s", report.path, report.missing, report.unexpected)
        for note in report.notes:
            log.warning("%s: %s", report.path, note)
        return report

    def _restore_position(
        self, loops: dict[str, Any], saved: Mapping[str, Any] | None, report: ckpt.LoadReport
    ) -> None:
        """Sees that training goes on at the next unseen sample, if the loaders kept their position."""
        state = loops["fit_loop"].get("state_dict", {})
        if not state.get("combined_loader") or saved is None:
            return  # plain loaders, or a checkpoint of plain Lightning: as Lightning does it
        own = None if report.rank_state is None else report.rank_state.get("combined_loader")
        loaders = self._run.train_loaders()
        same_steps = not saved["moved"] and saved["batch_sizes"] == position.batch_sizes(loaders)
        assert self._resumed is not None
        if same_steps and own is None and saved["size"] == self._run.data_parallel_size() == 1:
            own = state["combined_loader"]  # in the checkpoint is the state of the only rank
        if own and same_steps:
            state["combined_loader"] = own
            if not self._resumed.in_epoch:
                self._resumed.loader_states = state.pop("combined_loader")
            return
        del state["combined_loader"]
        done = position.batches_done(loops)
        if done:
            epoch = int(loops["fit_loop"]["epoch_progress"]["current"]["processed"])
            size = self._run.data_parallel_size()
            self._resumed.move = position.Move(saved, done, size, lambda: self._run.epoch() == epoch)

    def _weights_only(self) -> bool:
        """Plain data only, unless the user trusts the file: ``fit(..., weights_only=False)``."""
        return True if self._run.asked.weights_only is None else self._run.asked.weights_only


def _set_batches_done(trainer: Trainer, batches: int) -> None:
    """Moves the training loop to another number of batches in its epoch; a batch that is not finished stays so."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    unfinished = progress.ready - progress.completed
    progress.ready = progress.started = progress.processed = batches
    progress.completed = batches - unfinished


def _copy_into(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    target.copy_(value)
