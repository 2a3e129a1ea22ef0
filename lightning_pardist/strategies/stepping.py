"""What steps run with from ``setup`` on, and a step as Lightning asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.step import StepRunner
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.diagnosis import Diagnosis
from lightning_pardist.strategies.metrics import StepLogs, sync_epoch_metrics
from lightning_pardist.strategies.pipelining import Pipelining


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """The live objects of one spread module that its steps run with."""

    strategy: Strategy
    """Asked for its device, its precision plugin and its hooks around a backward pass."""
    module: LightningModule
    meshes: Meshes | None
    """None on a world of one rank."""
    model: ParallelModel
    runner: StepRunner
    logs: StepLogs
    diagnosis: Diagnosis
    pipelining: Pipelining | None
    """None without a pipeline axis."""

    def sync_epoch_metrics(self) -> None:
        """Gives all ranks the same epoch-level metrics; every rank calls it before anybody computes them."""
        assert self.meshes is not None
        if self.pipelining is not None:
            self.pipelining.sync_metrics()
            self.pipelining.compare_names(lightning_api.result_metrics(self.module.trainer))
        sync_epoch_metrics(self.module.trainer, self.meshes, self.strategy.root_device)
