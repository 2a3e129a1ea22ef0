"""The live objects of the running fit or evaluation, as saving and loading checkpoints see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_pardist import checkpoint as ckpt
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.strategies import lightning_api, lightning_data_api, position
from lightning_pardist.strategies.launcher import Asked


@dataclass
class LiveRun:
    """What is saved and loaded, from ``setup`` on."""

    options: CheckpointOptions
    asked: Asked
    model: ParallelModel | None = None
    module: LightningModule | None = None
    optimizers: Sequence[Optimizer] = ()
    loaders: lightning_data_api.TrainLoaders | None = None
    offset: tuple[int, position.Offset] | None = None
    """An epoch, and what of it was done on another layout."""

    def attach(
        self,
        module: LightningModule,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        loaders: lightning_data_api.TrainLoaders | None,
    ) -> None:
        """Notes the live objects.

        Raises:
            ValueError: if an optimizer's state cannot be stored by parameter name.
        """
        self.module, self.model, self.loaders = module, model, loaders
        self.optimizers = [optimizer for optimizer in optimizers if not lightning_api.is_stand_in(optimizer)]
        self.offset = None
        ckpt.check_optimizers(self.optimizers)

    def live(self) -> LightningModule:
        """Returns the user's module."""
        assert self.module is not None
        return self.module

    def trainer(self) -> Trainer:
        """Returns the module's Trainer."""
        return self.live().trainer

    def meshes(self) -> Meshes | None:
        """Returns the mesh; None on a world of one rank."""
        return None if self.model is None else self.model.meshes

    def foreign_buffers(self) -> frozenset[str]:
        """Returns the names of buffers that another stage of a pipeline keeps up to date."""
        pipeline = None if self.model is None else self.model.pipeline
        return frozenset() if pipeline is None else pipeline.foreign_buffers

    def is_first(self) -> bool:
        """Returns whether this is rank 0."""
        return self.meshes() is None or torch.distributed.get_rank() == 0

    def layout(self) -> dict[str, Any]:
        """Returns what tells this layout from others, as the manifest keeps it."""
        assert self.model is not None
        return {**self.model.plan.sizes.as_dict(), "zero_stage": self.model.plan.data_parallel.zero_stage}

    def epoch(self) -> int:
        """Returns how many epochs of training have ended."""
        progress: Any = self.trainer().fit_loop.epoch_progress.current
        return int(progress.processed)

    def data_parallel_size(self) -> int:
        """Returns the number of ranks with batches of their own."""
        meshes = self.meshes()
        return meshes.data_parallel_size if meshes is not None else 1

    def train_loaders(self) -> list[Any]:
        """Returns the training loaders one by one; none unless fitting."""
        return self.loaders.flattened() if self.loaders is not None else []
