"""Lightning's checkpoint hooks, each a call to the ``CheckpointKeeper``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.base.errors import message
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.checkpointing import CheckpointKeeper
from lightning_pardist.strategies.mesh_strategy import MeshStrategy


class CheckpointHooks(MeshStrategy):
    """What a strategy on a mesh answers when Lightning saves, loads and removes checkpoints."""

    _keeper: CheckpointKeeper

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        refuse_checkpoint_io(io)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # weights are read straight into the shards, which must exist

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._module().state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # read by name when the checkpoint is written; gathering it here would change nothing and cost all

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(_STORAGE_OPTIONS)
        self._keeper.save(checkpoint, str(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        lightning_api.empty_cache(self.root_device)
        return self._keeper.load(str(checkpoint_path), fitting=self._trainer().state.fn == TrainerFn.FITTING)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._keeper.restorer.load_edited_weights(checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._keeper.restorer.load_optimizers(self._trainer())

    @property
    def checkpoint_stall_s(self) -> float | None:
        """Seconds for which the last save held up training; None before the first."""
        return self._keeper.stall_s

    # A rank that an exception ends must not wait for others that do not know of it.

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._keeper.is_alone:
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._keeper.is_alone else super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._keeper.is_alone else super().reduce_boolean_decision(decision, all)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._keeper.remove(str(filepath))

    @override
    def on_train_start(self) -> None:
        self._keeper.restorer.before_first_batch(rank=self.data_parallel_rank, step=self._trainer().global_step)

    @override
    def on_train_end(self) -> None:
        self._keeper.join()


def refuse_checkpoint_io(checkpoint_io: CheckpointIO | None) -> None:
    """Refuses plugins that would write what one rank holds.

    Raises:
        ValueError: if there is one.
    """
    if checkpoint_io is None:
        return
    raise ValueError(
        message(
            "The strategy writes checkpoints itself, from all ranks; a CheckpointIO would see one rank's dictionary.",
            got=f"checkpoint_io={type(checkpoint_io).__name__}",
            source="the strategy's arguments or Trainer(plugins=...)",
            change="use checkpoint=CheckpointOptions(async_save=..., format=..., storage_options=...)",
        )
    )


_STORAGE_OPTIONS = message(
    "Options of the file system belong to the strategy, so that loads use them too.",
    got="storage_options in save_checkpoint",
    source="Trainer.save_checkpoint(..., storage_options=...)",
    change="HybridStrategy(checkpoint=CheckpointOptions(storage_options={...}))",
)
