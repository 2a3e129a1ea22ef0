"""Every pair of axes on four processes, all three on eight: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pardist import TensorOptions
from tests.parity.runs import differences
from tests.pipeline.runs import train, train_all
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
SECONDS = 280.0
CLIP = {"gradient_clip_val": 0.1}
BOTH = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
TWO = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
SEQUENCE = {"tensor": TensorOptions(sequence_parallel=True)}
Case = tuple[str, dict[str, Any], dict[str, Any]]
PAIRS: list[Case] = [
    ("gpt4", TWO, BOTH),
    ("gpt", TWO, CLIP),
    ("gpt4", {**TWO, **SEQUENCE}, BOTH),
    ("steep_gpt", {**TWO, "schedule": "zbv_zero_bubble"}, CLIP),
    ("steep_gpt", {**TWO, **SEQUENCE, "schedule": "interleaved_zero_bubble"}, CLIP),
    ("skip_gpt", TWO, CLIP),  # which recomputes blocks by itself
]


def test_stages_of_shared_matrices(run_distributed: WorkerPool, run_single: Any) -> None:
    wanted = [run_single(train, name, None, options) for name, _, options in PAIRS]
    found = []
    for rank, records in enumerate(run_distributed(train_all, PAIRS, world_size=4, timeout=SECONDS)):
        for case, record, want in zip(PAIRS, records, wanted, strict=True):
            found += [f"{case}, rank {rank}: {text}" for text in differences(record, want, partial=True)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])
