"""The judge of the data-parallel family: every module, every layout, against the unchanged module in one process.

Per-step losses and all other logged values, gradients before and after clipping, their norm, learning rates and weights
after six steps agree to 1e-5 with a run of the same global batch on one rank, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.runs import Record, differences, train, train_all
from tests.support.marks import NEEDS_TRANSFORMERS
from tests.support.modules import MODULES
from tests.support.pool import WorkerPool

STRATEGIES = ("pardist_ddp", "pardist_zero1", "pardist_zero2", "pardist_fsdp")
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt": {"gradient_clip_val": 0.3},
    "vit": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "llama": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "seq2seq": {"gradient_clip_val": 0.5},
    "convnet": {"sync_batchnorm": True, "gradient_clip_val": 0.5},
    "scalar_parameters": {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2},
    "lora": {"gradient_clip_val": 0.1},
    "shared_weights": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
    "unused_parameters": {"gradient_clip_val": 0.1},
    "weight_penalty": {"gradient_clip_val": 0.1},
}
"""Trainer arguments, the same for one process and many. Norms are far above the clip values, so clipping acts."""


def _modules() -> list[Any]:
    return [pytest.param(name, marks=NEEDS_TRANSFORMERS if name == "llama" else ()) for name in MODULES]


@pytest.fixture(scope="module")
def reference(run_single: Callable[..., Any]) -> Callable[[str], Record]:
    """The run of the unchanged module in one process, made once per module."""
    made: dict[str, Record] = {}

    def run(name: str) -> Record:
        if name not in made:
            made[name] = run_single(train, name, "auto", OPTIONS.get(name, {}))
        return made[name]

    return run


def _check(results: list[list[Record]], labels: tuple[str, ...], want: Record) -> None:
    found = []
    for rank, records in enumerate(results):
        for label, record in zip(labels, records, strict=True):
            found += [f"{label}, rank {rank}: {text}" for text in differences(record, want)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])


@pytest.mark.parametrize("name", _modules())
def test_two_ranks_equal_one_process(
    run_distributed: WorkerPool, reference: Callable[[str], Record], name: str
) -> None:
    cases = [(name, strategy, OPTIONS.get(name, {})) for strategy in STRATEGIES]
    _check(run_distributed(train_all, cases, world_size=2), STRATEGIES, reference(name))


@pytest.mark.parametrize("name", _modules())
def test_hybrid_on_two_nodes_equals_one_process(
    run_distributed: WorkerPool, reference: Callable[[str], Record], name: str
) -> None:
    cases = [(name, "pardist_hybrid", OPTIONS.get(name, {}))]
    results = run_distributed(train_all, cases, 2, world_size=4, num_nodes=2)
    _check(results, ("pardist_hybrid",), reference(name))
