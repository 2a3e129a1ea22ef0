"""The plan of a run as a file beside its logs."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_pardist.base.errors import message


class PlanFile(Callback):
    """Writes the plan as JSON into the run's log folder, on rank 0, so that two runs can be compared.

    Args:
        filename: name of the file inside the log folder (``trainer.log_dir``, else ``default_root_dir``).

    Raises:
        ValueError: if the strategy is not one of this package's.
    """

    def __init__(self, filename: str = "plan.json") -> None:
        super().__init__()
        self._filename = filename

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        if plan is None:
            raise ValueError(
                message(
                    "PlanFile writes the plan of a lightning_pardist strategy.",
                    got=type(trainer.strategy).__name__,
                    source="Trainer(strategy=...)",
                    change="use a pardist_* strategy, or leave the callback out",
                )
            )
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # every rank must ask: Lightning broadcasts it
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self._filename).write_text(plan.to_json() + "\n")
