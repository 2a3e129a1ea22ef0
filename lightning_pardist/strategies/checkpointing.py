"""Lightning's checkpoint hooks over ``lightning_pardist.checkpoint``: saving, removing, and the way to the loading."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint.storage import open_storage
from lightning_pardist.mesh import end_private_group, private_host_group
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import all_present
from lightning_pardist.run.buffers import averaged_statistics
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.strategies import lightning_api, lightning_data_api, position, resume
from lightning_pardist.strategies.launcher import Asked
from lightning_pardist.strategies.live_run import LiveRun
from lightning_pardist.strategies.restoring import OURS, Restorer

log = get_logger(__name__)

ROLL_CALL_S = 15.0
"""How long a save after an exception waits for ranks that may never come."""


class CheckpointKeeper:
    """Saves the checkpoints of one strategy, and has them loaded."""

    def __init__(self, options: CheckpointOptions, asked: Asked) -> None:
        self._run = LiveRun(options, asked)
        self.restorer = Restorer(self._run)
        self._saver: ckpt.Saver | None = None
        self._group: dist.ProcessGroup | None = None
        self._last: ckpt.SaveHandle | None = None
        self.is_alone = False
        """Set once an exception ends the run and other ranks do not know of it: nothing may wait for them."""

    @property
    def options(self) -> CheckpointOptions:
        """What the user chose about checkpoints."""
        return self._run.options

    def attach(
        self,
        module: LightningModule,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        loaders: lightning_data_api.TrainLoaders | None,
    ) -> None:
        """Notes the live objects; every rank calls it in ``setup``."""
        self._run.attach(module, model, optimizers, loaders)
        self.restorer.forget()
        self.is_alone = False

    def load(self, path: str, *, fitting: bool) -> dict[str, Any]:
        """Loads a checkpoint, after what is being written is there: see ``Restorer.load``."""
        self.join()
        return self.restorer.load(path, fitting=fitting)

    @property
    def stall_s(self) -> float | None:
        """Seconds for which the last save held up training."""
        return self._last.stall_s if self._last is not None else None

    def save(self, content: dict[str, Any], path: str) -> None:
        """Writes what Lightning has collected, with the live weights and optimizer state; every rank calls it."""
        trainer = self._run.trainer()
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
        if self._run.options.async_save and any(_wants_link(callback) for callback in lightning_api.callbacks(trainer)):
            saver.wait()  # save_last="link": the link must not point to what is not there yet
        self._last = handle
        if self._run.is_first():
            log.info("%s: training stood still for %.3f s", handle.path, handle.stall_s)

    def _all_came(self, trainer: Trainer) -> bool:
        """Returns whether all ranks save; after an exception a rank cannot know, and waits for them a while, once."""
        meshes = self._run.meshes()
        if meshes is not None and lightning_api.is_interrupted(trainer) and not self.is_alone:
            self.is_alone = not all_present(meshes, ROLL_CALL_S)
        return not self.is_alone

    def join(self) -> None:
        """Waits for the save that is being written, if any."""
        if self._saver is None:
            return
        pending = self._saver.pending
        self._saver.wait()
        if pending is not None and pending.error is None and self._run.is_first():
            log.info("%s: complete after %.3f s", pending.path, pending.total_s)

    def close(self) -> None:
        """Waits, and gives the folders back."""
        saver, self._saver = self._saver, None
        group, self._group = self._group, None
        try:
            if saver is not None:
                saver.close()
        finally:
            if group is not None:
                end_private_group(group)

    def remove(self, path: str) -> None:
        """Removes a checkpoint; rank 0 does it, after what is being written is there."""
        self.join()
        if not self._run.is_first() or self.is_alone:
            return
        if os.path.islink(path):
            os.unlink(path)
            return
        storage, target = open_storage(path, self._run.options.storage_options)
        storage.remove(target)

    def _state(self, content: dict[str, Any]) -> ckpt.TrainState:
        assert self._run.model is not None
        trainer_state = {k: v for k, v in content.items() if k not in ("state_dict", "optimizer_states")}
        model_state = dict(content["state_dict"])
        if self._run.meshes() is not None:
            model_state.update({n: v for n, v in averaged_statistics(self._run.model).items() if n in model_state})
        own_loader = _loader_state(trainer_state)
        trainer_state[OURS] = {
            "data": self._position(content),
            "seed": torch.initial_seed() % 2**32,
            "trainable": [n for n, p in self._run.model.module.named_parameters() if p.requires_grad],
        }
        rank_state = {"generators": resume.generator_states(), "combined_loader": own_loader}
        whole_run = "optimizer_states" in content
        return ckpt.TrainState(
            module=self._run.model.module,
            optimizers=self._run.optimizers if whole_run else (),
            trainer=trainer_state,
            rank_state=rank_state if whole_run else None,
            model_state=model_state,
            absent_parameters=self._run.model.absent,
            foreign_buffers=self._run.foreign_buffers(),
        )

    def _info(self, content: Mapping[str, Any]) -> ckpt.SaveInfo:
        return ckpt.SaveInfo(step=content["global_step"], epoch=content["epoch"], layout=self._run.layout())

    def _position(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns how far the training loaders are."""
        loaders = self._run.train_loaders()
        offset = None
        if self._run.offset is not None and self._run.offset[0] == self._run.epoch():
            offset = self._run.offset[1]
        done = position.batches_done(content["loops"])
        return position.describe(loaders, done, self._run.data_parallel_size(), offset, is_first=self._run.is_first())

    def _live_saver(self) -> ckpt.Saver:
        if self._saver is None:
            meshes = self._run.meshes()
            self._group = None if meshes is None else private_host_group(meshes, self._run.options.timeout_s)
            self._saver = ckpt.Saver(self._run.options, self._group)
        return self._saver


def _wants_link(callback: object) -> bool:
    return isinstance(callback, ModelCheckpoint) and callback.save_last == "link"


def _loader_state(content: Mapping[str, Any]) -> Any:
    """This rank's position in the training data, where the loaders keep one."""
    return content["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader")
