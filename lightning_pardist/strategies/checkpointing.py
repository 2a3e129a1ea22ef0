"""Lightning's checkpoint hooks over ``lightning_pardist.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
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
from lightning_pardist.strategies import lightning_api, resume
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
    skip: int = 0
    in_epoch: bool = False


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

    def attach(
        self,
        module: LightningModule,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        loaders: lightning_api.TrainLoaders | None,
    ) -> None:
        """Notes the live objects; every rank calls it in ``setup``."""
        self._module, self._model, self._optimizers, self._loaders = module, model, optimizers, loaders
        ckpt.check_optimizers(optimizers)

    @property
    def stall_s(self) -> float | None:
        """Seconds for which the last save held up training."""
        return self._last.stall_s if self._last is not None else None

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, content: dict[str, Any], path: str) -> None:
        """Writes what Lightning has collected, with the live weights and optimizer state; every rank calls it."""
        trainer, meshes = self._trainer(), self._meshes()
        if meshes is not None and lightning_api.is_interrupted(trainer) and not all_present(meshes, ROLL_CALL_S):
            log.error(
                "no checkpoint is saved at %s: after an exception not all ranks came, and some alone cannot save",
                path,
            )
            return
        saver = self._live_saver()
        handle = saver.save(path, self._state(content), self._info(content))
        if self.options.async_save and any(_wants_link(callback) for callback in lightning_api.callbacks(trainer)):
            saver.wait()  # save_last="link": the link must not point to what is not there yet
        self._last = handle

    def join(self) -> None:
        """Waits for the save that is being written, if any."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Waits, and gives the folders back."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def remove(self, path: str) -> None:
        """Removes a checkpoint; rank 0 does it, after what is being written is there."""
        self.join()
        if not self._is_first():
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
            "rows_per_step": self._rows_per_step(),
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

    def _rows_per_step(self) -> int | None:
        """Samples that all ranks together take per batch, if the loaders tell."""
        sizes = [getattr(loader, "batch_size", None) for loader in (self._loaders.flattened() if self._loaders else ())]
        known = [int(size) for size in sizes if size is not None]
        if not known or len(known) < len(sizes):
            return None
        meshes = self._meshes()
        return sum(known) * (meshes.data_parallel_size if meshes else 1)

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
            log.warning("%s holds weights only: optimizers, schedulers and loops start anew", report.path)
            return {"pytorch-lightning_version": lightning_api.VERSION, "lr_schedulers": [], "optimizer_states": []}
        content = dict(report.trainer)
        ours = content.pop(OURS, {})
        self._resumed = _Resumed(report, ours, waits_for_groups=unfreezes)
        self._resumed.in_epoch = "loops" in content and resume.batches_done(content["loops"]) > 0
        if fitting:
            self._restore_position(content, ours, report)
        self._given = dict(self._live().state_dict()) if self._edits_weights() else {}
        content["state_dict"] = dict(self._given)
        if "lr_schedulers" in content:
            content["optimizer_states"] = []  # filled in place already, or by load_optimizers
        return content

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
        resumed = self._resumed
        if resumed is None:
            return loader
        if not resumed.in_epoch:
            self._restore_generators(resumed, rank, step)
        return resume.SkipFirst(loader, resumed.skip) if resumed.skip else loader

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
        folder = os.path.dirname(os.path.realpath(path))
        found = ckpt.complete_checkpoints(folder, self.options.storage_options)
        return [other for other in found if os.path.realpath(other) != os.path.realpath(path)]

    def _load(self, path: str, what: Any) -> ckpt.LoadReport:
        assert self._model is not None
        state = ckpt.TrainState(self._model.module, self._optimizers if what == "all" else ())
        request = ckpt.LoadRequest(
            what=what, strict=self._live().strict_loading, weights_only=self._weights_only(), layout=self._layout()
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

    def _restore_position(self, content: dict[str, Any], ours: Mapping[str, Any], report: ckpt.LoadReport) -> None:
        loops = content.get("loops")
        saved = None if loops is None else loops["fit_loop"].get("state_dict", {}).pop("combined_loader", None)
        if not saved or loops is None:
            return
        assert self._resumed is not None
        if report.rank_state is not None and report.rank_state.get("combined_loader"):
            loops["fit_loop"]["state_dict"]["combined_loader"] = report.rank_state["combined_loader"]
            return
        before, now = ours.get("rows_per_step"), self._rows_per_step()
        done = resume.batches_done(loops)
        if not before or not now or not done:
            return
        batches, rest = divmod(done * before, now)
        if rest:
            log.warning("%d sample(s) of the epoch are seen twice: steps of %d and %d do not meet", rest, before, now)
        self._resumed.skip = batches
        resume.move_position(loops, batches)

    def _edits_weights(self) -> bool:
        return lightning_api.overrides(self._live(), "on_load_checkpoint")

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


def _copy_into(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    target.copy_(value)
