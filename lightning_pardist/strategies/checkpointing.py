"""Lightning's checkpoint hooks over ``lightning_pardist.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.mesh import Meshes, private_host_group
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import all_present, gather_objects
from lightning_pardist.run.buffers import averaged_statistics
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.strategies import lightning_api, position, resume
from lightning_pardist.strategies.launcher import Asked

log = get_logger(__name__)

OURS = "pardist_resume"
"""Key of what we keep beside Lightning's own entries."""
ROLL_CALL_S = 15.0
"""How long a save after an exception waits for ranks that may never come."""


@dataclass
class _Resumed:
    """What a load has left to do until training goes on."""

    report: ckpt.LoadReport
    ours: Mapping[str, Any]
    waits_for_groups: bool
    """Optimizer state is loaded once a finetuning callback has rebuilt the groups."""
    in_epoch: bool = False
    move: position.Move | None = None
    """Set if the position in the data was saved on another layout."""


class CheckpointKeeper:
    """Saves and loads the checkpoints of one strategy."""

    def __init__(self, options: CheckpointOptions, asked: Asked) -> None:
        self.options = options
        self._asked = asked
        self._saver: ckpt.Saver | None = None
        self._model: ParallelModel | None = None
        self._module: LightningModule | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._loaders: lightning_api.TrainLoaders | None = None
        self._last: ckpt.SaveHandle | None = None
        self._given: dict[str, Any] = {}
        self._resumed: _Resumed | None = None
        self._offset: tuple[int, position.Offset] | None = None
        self.is_alone = False
        """Set once an exception ends the run and other ranks do not know of it: nothing may wait for them."""

    def attach(
        self,
        module: LightningModule,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        loaders: lightning_api.TrainLoaders | None,
    ) -> None:
        """Notes the live objects; every rank calls it in ``setup``."""
        self._module, self._model, self._loaders = module, model, loaders
        self._optimizers = [optimizer for optimizer in optimizers if not lightning_api.is_stand_in(optimizer)]
        self._offset = self._resumed = None
        self.is_alone = False
        ckpt.check_optimizers(self._optimizers)

    @property
    def stall_s(self) -> float | None:
        """Seconds for which the last save held up training."""
        return self._last.stall_s if self._last is not None else None

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, content: dict[str, Any], path: str) -> None:
        """Writes what Lightning has collected, with the live weights and optimizer state; every rank calls it."""
        trainer = self._trainer()
        if not self._all_came(trainer):
            log.error(
                "no checkpoint is saved at %s: an exception ends this rank, not all ranks came to save within %g s, "
                "and some alone cannot",
                path,
                ROLL_CALL_S,
            )
            return
        saver = self._live_saver()
        handle = saver.save(path, self._state(content), self._info(content))
        if self.options.async_save and any(_wants_link(callback) for callback in lightning_api.callbacks(trainer)):
            saver.wait()  # save_last="link": the link must not point to what is not there yet
        self._last = handle
        if self._is_first():
            log.info("%s: training stood still for %.3f s", handle.path, handle.stall_s)

    def _all_came(self, trainer: Trainer) -> bool:
        """Returns whether all ranks save; after an exception a rank cannot know, and waits for them a while, once."""
        meshes = self._meshes()
        if meshes is not None and lightning_api.is_interrupted(trainer) and not self.is_alone:
            self.is_alone = not all_present(meshes, ROLL_CALL_S)
        return not self.is_alone

    def join(self) -> None:
        """Waits for the save that is being written, if any."""
        if self._saver is None:
            return
        pending = self._saver.pending
        self._saver.wait()
        if pending is not None and pending.error is None and self._is_first():
            log.info("%s: complete after %.3f s", pending.path, pending.total_s)

    def close(self) -> None:
        """Waits, and gives the folders back."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def remove(self, path: str) -> None:
        """Removes a checkpoint; rank 0 does it, after what is being written is there."""
        self.join()
        if not self._is_first() or self.is_alone:
            return
        if os.path.islink(path):
            os.unlink(path)
            return
        storage, target = open_storage(path, self.options.storage_options)
        storage.remove(target)

    def _state(self, content: dict[str, Any]) -> ckpt.TrainState:
        assert self._model is not None
        trainer_state = {k: v for k, v in content.items() if k not in ("state_dict", "optimizer_states")}
        model_state = dict(content["state_dict"])
        if self._meshes() is not None:
            model_state.update({n: v for n, v in averaged_statistics(self._model).items() if n in model_state})
        own_loader = _loader_state(trainer_state)
        trainer_state[OURS] = {
            "data": self._position(content),
            "seed": torch.initial_seed() % 2**32,
            "trainable": [n for n, p in self._model.module.named_parameters() if p.requires_grad],
        }
        rank_state = {"generators": resume.generator_states(), "combined_loader": own_loader}
        whole_run = "optimizer_states" in content
        return ckpt.TrainState(
            module=self._model.module,
            optimizers=self._optimizers if whole_run else (),
            trainer=trainer_state,
            rank_state=rank_state if whole_run else None,
            model_state=model_state,
        )

    def _info(self, content: Mapping[str, Any]) -> ckpt.SaveInfo:
        return ckpt.SaveInfo(step=content["global_step"], epoch=content["epoch"], layout=self._layout())

    def _layout(self) -> dict[str, Any]:
        assert self._model is not None
        return {**self._model.plan.sizes.as_dict(), "zero_stage": self._model.plan.data_parallel.zero_stage}

    def _position(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns how far the training loaders are."""
        loaders = self._loaders.flattened() if self._loaders is not None else []
        offset = None
        if self._offset is not None and self._offset[0] == self._epoch():
            offset = self._offset[1]
        done = position.batches_done(content["loops"])
        return position.describe(loaders, done, self._data_parallel_size(), offset, is_first=self._is_first())

    def _epoch(self) -> int:
        progress: Any = self._trainer().fit_loop.epoch_progress.current
        return int(progress.processed)

    def _data_parallel_size(self) -> int:
        meshes = self._meshes()
        return meshes.data_parallel_size if meshes is not None else 1

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(self, path: str, *, fitting: bool) -> dict[str, Any]:
        """Fills module and optimizers in place; returns the rest in the form in which Lightning expects it.

        Every rank calls it; rank 0's path counts.
        """
        self.join()
        path = gather_objects(str(path), self._meshes())[0]
        unfreezes = fitting and any(isinstance(c, BaseFinetuning) for c in lightning_api.callbacks(self._trainer()))
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
            if "loops" in content:
                self._resumed.in_epoch = position.in_epoch(content["loops"])
                self._restore_position(content["loops"], ours.get("data"), report)
        content["state_dict"] = self._give_weights()
        if "lr_schedulers" in content:
            content["optimizer_states"] = []  # filled in place already, or by load_optimizers
        return content

    def _give_weights(self) -> dict[str, Any]:
        """Returns the weights that were loaded, for the user's hook to edit; none if there is no such hook."""
        edits = lightning_api.overrides(self._live(), "on_load_checkpoint")
        self._given = dict(self._live().state_dict()) if edits else {}
        return dict(self._given)

    def load_edited_weights(self, content: Mapping[str, Any]) -> None:
        """Takes over what ``on_load_checkpoint`` of the user's module has put into ``state_dict``."""
        changed = {k: v for k, v in content.get("state_dict", {}).items() if v is not self._given.get(k)}
        live = self._live().state_dict(keep_vars=True)
        with torch.no_grad():
            for name, value in changed.items():
                if name in live:
                    _copy_into(live[name], value)
        self._given = {}

    def load_optimizers(self, trainer: Trainer) -> None:
        """Restores optimizer state that had to wait for the groups of a finetuning callback."""
        resumed = self._resumed
        if resumed is None or not resumed.waits_for_groups:
            return
        for callback in lightning_api.callbacks(trainer):
            if isinstance(callback, BaseFinetuning):
                callback.on_fit_start(trainer, self._live())
        trainable = set(resumed.ours.get("trainable", ()))
        for name, parameter in self._live().named_parameters():
            parameter.requires_grad_(name in trainable)
        self._load(resumed.report.path, "all")

    def continued(self, loader: Any, *, rank: int, step: int) -> Any:
        """Returns a training loader that goes on where the checkpoint was.

        Before an epoch starts from its beginning the generators are set back: drawing its order is part of it.
        """
        trainer = self._trainer()
        if hasattr(loader, "state_dict") and sized_len(loader) is None:
            loader = position.ReadAhead(loader, lambda: lightning_api.batches_read_ahead(trainer))
        resumed = self._resumed
        if resumed is None:
            return loader
        # Lightning tells it later, when a loader with workers has begun to read, and one with a state has skipped.
        lightning_api.set_sampler_epoch(loader, self._epoch())
        if not resumed.in_epoch:
            self._restore_generators(resumed, rank, step)
        if resumed.move is not None:
            loader = resumed.move.apply(loader)
            _set_batches_done(trainer, resumed.move.done)
            if resumed.move.offset is not None:
                self._offset = (self._epoch(), resumed.move.offset)
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
            if self._asked.ckpt_path != "last":
                raise
            damage: ckpt.CorruptCheckpointError = error
        for other in gather_objects(self._others(path), self._meshes())[0]:
            log.warning("%s\nckpt_path='last' goes on with the complete checkpoint before it: %s", damage, other)
            try:
                return load(other)
            except ckpt.CorruptCheckpointError as error:
                damage = error
        raise damage

    def _holds_optimizers(self, path: str) -> bool:
        """Rank 0 looks whether a run can be resumed, or only weights be used."""
        found: bool | Exception = False
        if self._is_first():
            try:
                found = ckpt.holds_optimizers(path, self.options, weights_only=self._weights_only())
            except Exception as error:  # all ranks must hear of it
                found = error
        answer = gather_objects(found, self._meshes())[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _others(self, path: str) -> list[str]:
        if not self._is_first():
            return []
        storage, target = open_storage(path, self.options.storage_options)
        if storage.renames_atomically:
            target = os.path.realpath(target)
        found = ckpt.complete_checkpoints(storage.split(target)[0], self.options.storage_options)
        return [other for other in found if target not in (other, os.path.realpath(other))]

    def _load(self, path: str, what: Any) -> ckpt.LoadReport:
        assert self._model is not None
        state = ckpt.TrainState(self._model.module, self._optimizers if what == "all" else ())
        request = ckpt.LoadRequest(
            what=what,
            strict=self._live().strict_loading,
            weights_only=self._weights_only(),
            layout=self._layout(),
            rank_state=self._trainer().state.fn == TrainerFn.FITTING,
            prefix=None,
        )
        meshes = self._meshes()
        report = ckpt.load_checkpoint(
            path, state, request, options=self.options, control_group=None if meshes is None else meshes.control
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
        loaders = self._loaders.flattened() if self._loaders is not None else []
        same_steps = not saved["moved"] and saved["batch_sizes"] == position.batch_sizes(loaders)
        if own and same_steps:
            state["combined_loader"] = own
            return
        if same_steps and saved["size"] == self._data_parallel_size() == 1:
            return  # the state in the checkpoint is of the only rank
        del state["combined_loader"]
        done = position.batches_done(loops)
        assert self._resumed is not None
        if done:
            epoch = int(loops["fit_loop"]["epoch_progress"]["current"]["processed"])
            size = self._data_parallel_size()
            self._resumed.move = position.Move(saved, done, size, lambda: self._epoch() == epoch)

    def _weights_only(self) -> bool:
        """Plain data only, unless the user trusts the file: ``fit(..., weights_only=False)``."""
        return True if self._asked.weights_only is None else self._asked.weights_only

    # ---- the live objects ----------------------------------------------------------------------------------------

    def _live(self) -> LightningModule:
        assert self._module is not None
        return self._module

    def _trainer(self) -> Trainer:
        return self._live().trainer

    def _meshes(self) -> Meshes | None:
        return None if self._model is None else self._model.meshes

    def _is_first(self) -> bool:
        return self._meshes() is None or torch.distributed.get_rank() == 0

    def _live_saver(self) -> ckpt.Saver:
        if self._saver is None:
            meshes = self._meshes()
            group = None if meshes is None else private_host_group(meshes, self.options.timeout_s)
            self._saver = ckpt.Saver(self.options, group)
        return self._saver


def _wants_link(callback: object) -> bool:
    return isinstance(callback, ModelCheckpoint) and callback.save_last == "link"


def _loader_state(content: Mapping[str, Any]) -> Any:
    """This rank's position in the training data, where the loaders keep one."""
    return content["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader")


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
