"""Shards over a mesh of one rank: the code of many ranks, with the device's own collectives, on a single device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_pardist import HybridStrategy
from lightning_pardist.mesh import shared_meshes
from lightning_pardist.plan import PlanInput, make_plan
from lightning_pardist.specs.config import AxisSizes
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.batches import publish_data_rank
from lightning_pardist.strategies.precision import precision_plan


class OneRankMesh(HybridStrategy):
    """HybridStrategy with a process group and a mesh although there is one rank, and the plan of two."""

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._meshes is None:
            self._connect()
            self._meshes = shared_meshes(AxisSizes(), self.root_device.type, self._timeout)
            assert self.lightning_module is not None
            lightning_api.set_device_mesh(self.lightning_module, self._meshes.world)
            publish_data_rank(self._meshes)

    @override
    def setup(self, trainer: Trainer) -> None:
        with mock.patch("lightning_pardist.strategies.spread.make_plan", self._plan):
            super().setup(trainer)

    def _plan(self, given: PlanInput, **made: Any) -> ParallelPlan:
        precision = precision_plan(self.precision_plugin, sharded=True)
        two = replace(given, sizes=AxisSizes(data_parallel_shard=2), precision=precision)
        plan = make_plan(two, **made)
        return replace(plan, sizes=AxisSizes(), state_per_rank=plan.state_one_process)
