"""MeshStrategy: who the ranks are, how they meet, and the collectives that Lightning itself asks for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.mesh import Meshes, shared_meshes
from lightning_pardist.run.agree import maxima
from lightning_pardist.run.meeting import meet
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.diagnosis_options import DiagnosisOptions
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.batches import publish_data_rank
from lightning_pardist.strategies.launcher import Asked, InProcessLauncher, ScriptLauncher
from lightning_pardist.strategies.reductions import reduce_over

log = get_logger(__name__)


class MeshStrategy(ParallelStrategy):
    """Ranks on a device mesh, before any module is looked at."""

    def __init__(
        self,
        config: ParallelConfig,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        self.config = config
        self._meshes: Meshes | None = None
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._asked = Asked()
        self.diagnosis_options = DiagnosisOptions()

    # ---- who and where -------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group, once it is known."""
        return self._process_group_backend

    @property
    def meshes(self) -> Meshes | None:
        """The live mesh; None before ``setup_environment`` and on a world of one rank."""
        return self._meshes

    @property
    def device_mesh(self) -> DeviceMesh:
        """All axes as one mesh, as ``LightningModule.device_mesh`` shows it.

        Raises:
            RuntimeError: before the processes have met, and on a world of one rank.
        """
        if self._meshes is None:
            raise RuntimeError("there is no device mesh before the processes have met, nor on a single rank")
        return self._meshes.world

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning should deal samples over ranks; a single rank keeps the user's own sampler."""
        return self.world_size > 1

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the samples this rank reads."""
        return 0 if self._meshes is None else self._meshes.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of shares the samples are dealt into."""
        return 1 if self._meshes is None else self._meshes.data_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # ---- processes and mesh --------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self.cluster_environment.creates_processes_externally:
            self._launcher = InProcessLauncher(self._asked)
        else:
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher.asked = self._asked

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's helpers which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        lightning_api.set_rank_zero(self.global_rank)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        # Before any collective: a wrong layout must not leave a rank waiting.
        self._check_ranks_started()
        sizes = self.config.resolve(world_size=self.world_size, num_nodes=self.num_nodes)
        if (self.world_size // self.num_nodes) % sizes.tensor_parallel and self.global_rank == 0:
            log.warning(
                "the tensor axis of %d ranks does not divide the %d ranks of a node, so matrices are shared across "
                "nodes: every block waits for the slow links",
                sizes.tensor_parallel,
                self.world_size // self.num_nodes,
            )
        reset_seed()
        if self.world_size > 1:
            self._connect()
            if self._meshes is None:
                self._meshes = shared_meshes(sizes, self.root_device.type, self._timeout)
            assert self.lightning_module is not None
            lightning_api.set_device_mesh(self.lightning_module, self._meshes.world)
        publish_data_rank(self._meshes)

    def _check_ranks_started(self) -> None:
        """Refuses a launcher that has started other ranks than the Trainer was told."""
        assert self.cluster_environment is not None
        started, asked = self.cluster_environment.world_size(), self.num_nodes * self.num_processes
        if started != asked:
            where = type(self.cluster_environment).__name__
            raise ValueError(
                message(
                    "The launcher must start as many ranks as the Trainer is told.",
                    got=f"{started} ranks were started; "
                    f"devices={self.num_processes} x num_nodes={self.num_nodes} = {asked}",
                    source=f"{where} (WORLD_SIZE or SLURM_NTASKS), and Trainer(devices=..., num_nodes=...)",
                    change="set devices to the ranks per node (torchrun's --nproc_per_node), num_nodes to the nodes",
                )
            )

    def _connect(self) -> None:
        if not lightning_api.distributed_is_initialized():
            assert self.cluster_environment is not None
            meet(
                self.cluster_environment.main_address,
                self.cluster_environment.main_port,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout_s=self.diagnosis_options.start_timeout_s,
            )
        self._process_group_backend = self._process_group_backend or lightning_api.default_backend(self.root_device)
        assert self.cluster_environment is not None
        device = None if self.root_device.type == "cpu" else self.root_device
        lightning_api.init_process_group(
            self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device
        )
        if dist.get_world_size() != self.world_size:
            raise ValueError(
                message(
                    "The process group and the Trainer must count the same ranks.",
                    got=f"{dist.get_world_size()} ranks in the process group, {self.world_size} in the Trainer",
                    source="the launcher, and Trainer(devices=..., num_nodes=...)",
                    change="make devices x num_nodes equal the number of processes that were started",
                )
            )

    # ---- collectives that Lightning asks for ---------------------------------------------------------------------

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Returns the tensor reduced over the data ranks (or ``group``); anything else comes back as it is."""
        if self._meshes is None or not isinstance(tensor, Tensor):
            return tensor
        return reduce_over(tensor, group or self._meshes.data_parallel_group, reduce_op, self.root_device)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._meshes is not None:
            maxima([0], self._meshes)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._meshes is None:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src, group=self._meshes.control)
        return box[0]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # Lightning's name
        (some_no, some_yes) = maxima([not decision, bool(decision)], self._meshes)
        return not some_no if all else bool(some_yes)

    # ---- the user's objects --------------------------------------------------------------------------------------

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _trainer(self) -> Trainer:
        return self._module().trainer
