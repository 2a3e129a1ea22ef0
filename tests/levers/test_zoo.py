"""Recomputation under the judge of the data-parallel family: modules of many kinds against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_pardist import HybridStrategy, RecomputeOptions
from tests.parity.runs import Record, differences, train
from tests.support.marks import NEEDS_TRANSFORMERS
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
NAMES = ("seq2seq", "lora", "shared_weights", "unused_parameters", "recomputed_gpt", "routed_experts")
"""Two stacks, frozen weights, ties between blocks, branches, own checkpoints, experts; Llama also fills a cache."""
LAYOUTS: tuple[dict[str, Any], ...] = ({"zero_stage": 0}, {"zero_stage": 3, "data_parallel_replicate_size": 1})
OPTIONS: dict[str, dict[str, Any]] = {
    "shared_weights": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
}


def _recomputed(name: str) -> list[Record]:
    return [
        train(name, HybridStrategy(print_plan=False, recompute=recompute, **layout), OPTIONS.get(name, {}))
        for layout in LAYOUTS
        for recompute in (RecomputeOptions(), RecomputeOptions(mode="selective"))
    ]


@pytest.mark.parametrize("name", [*NAMES, pytest.param("llama", marks=NEEDS_TRANSFORMERS)])
def test_modules_of_many_kinds(run_distributed: WorkerPool, run_single: Callable[..., Any], name: str) -> None:
    reference = run_single(train, name, "auto", OPTIONS.get(name, {}))
    found = []
    for rank, records in enumerate(run_distributed(_recomputed, name, timeout=200.0)):
        for index, record in enumerate(records):
            found += [f"run {index}, rank {rank}: {text}" for text in differences(record, reference)]
    assert not found, "\n".join(found[:20])
