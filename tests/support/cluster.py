"""The pool's ranks as Lightning sees them."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only


class PoolEnvironment(ClusterEnvironment):
    """A cluster environment for code that runs in a worker of the pool.

    For tests that hand the environment over, as ``Trainer(plugins=[PoolEnvironment()])`` or
    ``HybridStrategy(cluster_environment=PoolEnvironment())``. Without it Lightning finds the same ranks in the
    environment variables that the pool sets.

    Args:
        num_nodes: over how many pretended nodes the ranks are spread; by default as the pool was told.
    """

    def __init__(self, num_nodes: int | None = None) -> None:
        super().__init__()
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._rank = int(os.environ["RANK"])
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        if num_nodes is not None:
            if self._world_size % num_nodes:
                raise ValueError(f"{self._world_size} ranks cannot be split evenly over {num_nodes} nodes")
            per_node = self._world_size // num_nodes
        self._per_node = per_node

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        if size != self._world_size:
            raise ValueError(
                f"the pool runs {self._world_size} ranks, and the Trainer's devices times num_nodes give {size}"
            )

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self._rank:
            raise ValueError(f"this is rank {self._rank} of the pool, and Lightning computed rank {rank}")
        rank_zero_only.rank = rank

    def local_rank(self) -> int:
        return self._rank % self._per_node

    def node_rank(self) -> int:
        return self._rank // self._per_node
