"""Which samples of a data loader a rank gets, and how ranks with unequal shares keep in step."""

from __future__ import annotations

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer

from lightning_pardist.strategies import lightning_data_api
from lightning_pardist.strategies.batches import (
    agree_on_length,
    check_enough_to_predict,
    check_none_empty,
    keep_order,
)
from lightning_pardist.strategies.mesh_strategy import MeshStrategy
from lightning_pardist.strategies.peers import has_peers
from lightning_pardist.strategies.restoring import Restorer
from lightning_pardist.strategies.turns import deal_each_once, has_own_dealing


class Dealing:
    """What a strategy does to every data loader, before and after Lightning deals its samples."""

    def __init__(self, strategy: MeshStrategy, restorer: Restorer) -> None:
        """Knows no loader yet.

        Args:
            strategy: asked for its mesh and data rank.
            restorer: knows where a resumed epoch goes on.
        """
        self._strategy = strategy
        self._restorer = restorer
        self._is_dealt = False
        """Lightning deals the samples of the loader that it is preparing."""

    def see(self, dataloader: object, trainer: Trainer) -> None:
        """Looks at a loader as the user made it, just before Lightning deals its samples."""
        self._is_dealt = lightning_data_api.deals_samples(trainer) and not has_own_dealing(dataloader)
        if trainer.predicting and self._is_dealt:
            check_enough_to_predict(dataloader, self._strategy.data_parallel_size)

    def process(
        self, dataloader: object, trainer: Trainer, loaders: lightning_data_api.TrainLoaders | None, *, in_step: bool
    ) -> object:
        """Returns a loader that gives this rank's batches, as many as all ranks can take.

        Args:
            dataloader: after Lightning has dealt its samples.
            trainer: tells which loop it is for.
            loaders: the user's training loaders; None unless fitting.
            in_step: steps without gradients need all ranks too.
        """
        meshes, rank = self._strategy.meshes, self._strategy.data_parallel_rank
        if has_peers(meshes):
            lightning_data_api.seed_workers_by(dataloader, rank)
        if trainer.training and loaders is not None:
            keep_order(dataloader, loaders)
            dataloader = self._restorer.continued(dataloader, trainer, rank=rank)
        if meshes is None:
            return dataloader
        if not trainer.training and self._is_dealt:
            deal_each_once(dataloader)
        check_none_empty(dataloader, meshes)
        if (trainer.predicting or (self._is_dealt and not trainer.training)) and sized_len(dataloader) is not None:
            return dataloader  # ranks with a batch less join the others' steps, see Evaluation.step
        if not trainer.training and not in_step:
            return dataloader  # evaluating whole copies needs no other rank
        return agree_on_length(dataloader, meshes, training=trainer.training)
