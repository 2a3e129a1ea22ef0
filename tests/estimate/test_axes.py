"""Estimates of layouts with tensor and pipeline axes, against real steps on eight ranks: bytes, counts, activations."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_pardist import PipelineOptions, RecomputeOptions, TensorOptions, estimate
from tests.composition.headline import Headline, Texts
from tests.estimate.live import ROWS, Case, Seen, foretold, steps_of
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(600)
SECONDS = 560.0
ALL_THREE = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_shard_size": 2}
CASES: dict[str, Case] = {
    "2 x 2 x 2": (ALL_THREE, "32-true"),
    "2 x 2 x 2, sequence, recompute, bf16": (
        {**ALL_THREE, "tensor": TensorOptions(sequence_parallel=True), "recompute": RecomputeOptions()},
        "bf16-mixed",
    ),
    "pp 2 x hybrid 2 x 2, interleaved": (
        {
            "pipeline_parallel_size": 2,
            "data_parallel_replicate_size": 2,
            "data_parallel_shard_size": 2,
            "pipeline": PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4),
        },
        "32-true",
    ),
    "tp 2 x pp 2 x copies 2": (
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 0},
        "32-true",
    ),
    "tp 2 x fsdp 4": ({"tensor_parallel_size": 2, "data_parallel_shard_size": 4}, "32-true"),
}


@pytest.fixture(scope="module")
def real(run_distributed: WorkerPool) -> dict[str, list[Seen]]:
    """Case -> what each rank saw."""
    ranks = run_distributed(steps_of, list(CASES.values()), world_size=8, timeout=SECONDS)
    return {name: [found[number] for found in ranks] for number, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def batch() -> Any:
    return next(iter(DataLoader(Texts(ROWS, 5), batch_size=ROWS)))


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_keeps_and_sends_what_was_foretold(real: dict[str, list[Seen]], batch: Any, case: str) -> None:
    layout, precision = CASES[case]
    found = estimate(Headline(), batch, world_size=8, precision=precision, **layout)
    wrong = []
    for rank, seen in enumerate(real[case]):
        terms = found.memory_by_rank[rank]
        if (terms.parameters, terms.gradients, terms.optimizer) != seen.state:
            wrong.append((rank, "state", (terms.parameters, terms.gradients, terms.optimizer), seen.state))
        if foretold(found.traffic_by_rank[rank], seen.groups) != seen.traffic:
            wrong.append((rank, "traffic", foretold(found.traffic_by_rank[rank], seen.groups), seen.traffic))
        # Of an uneven vocabulary the first rank of the tensor axis has more, and is counted for all of them.
        is_first = rank == min(seen.groups["tensor_parallel"])
        if terms.activations != pytest.approx(seen.activations, rel=0.01 if is_first else 0.02):
            wrong.append((rank, "activations", terms.activations, seen.activations))
        if not is_first and (terms.activations or 0) < 0.99 * seen.activations:
            wrong.append((rank, "more activations", terms.activations, seen.activations))
    assert any("uneven" in note for note in found.assumptions) == ("tensor_parallel_size" in layout)
    assert not wrong, "\n".join(map(str, wrong))
