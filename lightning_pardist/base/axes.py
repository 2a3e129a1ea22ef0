"""Names of the mesh axes, outermost first.

An *axis* is always a mesh axis; a *dim* is always a tensor dimension.
"""

from __future__ import annotations

from typing import Final

PIPELINE_PARALLEL: Final = "pipeline_parallel"
DATA_PARALLEL_REPLICATE: Final = "data_parallel_replicate"
DATA_PARALLEL_SHARD: Final = "data_parallel_shard"
CONTEXT_PARALLEL: Final = "context_parallel"
TENSOR_PARALLEL: Final = "tensor_parallel"

AXES: Final[tuple[str, ...]] = (
    PIPELINE_PARALLEL,
    DATA_PARALLEL_REPLICATE,
    DATA_PARALLEL_SHARD,
    CONTEXT_PARALLEL,
    TENSOR_PARALLEL,
)
"""Outer to inner: neighbours on the innermost axis are neighbours in rank, so it gets the fastest links."""

DATA_PARALLEL: Final = "data_parallel"
"""The joint axis of replicate and shard: ranks that differ on it read different samples."""

DATA_AXES: Final[tuple[str, ...]] = (DATA_PARALLEL_REPLICATE, DATA_PARALLEL_SHARD)

MODEL: Final = "model"
"""The joint axis of all but the replicas: ranks that together hold one copy of the model."""

MODEL_AXES: Final[tuple[str, ...]] = (PIPELINE_PARALLEL, DATA_PARALLEL_SHARD, CONTEXT_PARALLEL, TENSOR_PARALLEL)
