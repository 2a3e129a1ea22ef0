"""Tensor parallel trains unchanged modules to the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pardist import TensorOptions
from tests.support.pool import WorkerPool
from tests.tensor_parallel.models import MODELS
from tests.tensor_parallel.runs import differences, train_all

Case = tuple[str, "dict[str, Any] | None", "dict[str, Any]"]

TWO = {"tensor_parallel_size": 2}
FOUR = {"tensor_parallel_size": 4}
PARTLY = {**TWO, "tensor": TensorOptions(plan={"net.blocks.0.attention.*": "replicate"})}
"""The norms over heads of one block see all heads, those of the other a share."""
HARD: list[Case] = [
    ("fused split", FOUR, {}),
    ("grouped fused", FOUR, {}),  # 2 key-value heads on 4 ranks
    ("llama", FOUR, {}),
    ("latent", FOUR, {}),
    ("tower", FOUR, {}),
    ("fused split", TWO, {}),  # with fully_shard over the other two
    ("grouped fused", TWO, {"accumulate_grad_batches": 2}),
    ("gpt2", TWO, {}),
    ("t5", {**TWO, "zero_stage": 2}, {}),
    ("llama-3-heads", TWO, {}),
    ("llama", {**TWO, "zero_stage": 0}, {"accumulate_grad_batches": 2}),
    ("vit", {**TWO, "data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}, {}),
]


def check(run_distributed: WorkerPool, run_single: Any, cases: list[Case], world_size: int) -> None:
    references: dict[str, Any] = {}
    for name, _, options in cases:
        key = repr((name, options))
        if key not in references:
            references[key] = (name, None, options)
    wanted = dict(zip(references, run_single(train_all, list(references.values()))))
    ranks = run_distributed(train_all, cases, world_size=world_size, timeout=300)
    for number, (name, options, trainer) in enumerate(cases):
        for rank, runs in enumerate(ranks):
            found = differences(runs[number], wanted[repr((name, trainer))])
            assert not found, (name, options, trainer, rank, found[:5])


@pytest.mark.hf
@pytest.mark.timeout(300)
def test_two_ranks(run_distributed: WorkerPool, run_single: Any) -> None:
    check(
        run_distributed,
        run_single,
        [*((name, TWO, {}) for name in MODELS), ("grouped fused", PARTLY, {})],
        2,
    )


@pytest.mark.hf
@pytest.mark.timeout(300)
def test_four_ranks(run_distributed: WorkerPool, run_single: Any) -> None:
    check(run_distributed, run_single, HARD, 4)


SEQUENCE = {"tensor_parallel_size": 2, "tensor": TensorOptions(sequence_parallel=True)}


@pytest.mark.hf
@pytest.mark.timeout(300)
def test_sequence_parallel(run_distributed: WorkerPool, run_single: Any) -> None:
    """5 positions do not divide over 2 ranks."""
    names = ["fused split", "grouped fused", "latent", "gpt2", "llama", "t5", "encoder", "encoder-length-first", "vit"]
    check(run_distributed, run_single, [(name, SEQUENCE, {}) for name in names], 2)


@pytest.mark.hf
@pytest.mark.timeout(300)
def test_sequence_parallel_with_fully_shard(run_distributed: WorkerPool, run_single: Any) -> None:
    check(run_distributed, run_single, [("gpt2", SEQUENCE, {}), ("llama", SEQUENCE, {"accumulate_grad_batches": 2})], 4)


MANUAL: list[Case] = [
    ("adversarial", FOUR, {"gradient_clip_val": None}),  # 2 key-value heads on 4 ranks
    ("adversarial", TWO, {"gradient_clip_val": None}),
    ("adversarial", {**TWO, "zero_stage": 0}, {"gradient_clip_val": None}),
]


@pytest.mark.timeout(300)
def test_manual_optimization(run_distributed: WorkerPool, run_single: Any) -> None:
    check(run_distributed, run_single, MANUAL[1:2], 2)
    check(run_distributed, run_single, MANUAL, 4)
