"""Recomputation, compilation and offload on tensor and pipeline axes: nothing but memory and time may change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_pardist import CompileOptions, RecomputeOptions, TensorOptions
from tests.levers.common import Net, Seen
from tests.levers.common import train as train_net
from tests.parity.runs import differences
from tests.pipeline.runs import train, train_all
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
SECONDS = 280.0
CLIP = {"gradient_clip_val": 0.1}
FULL, SELECTIVE = RecomputeOptions(), RecomputeOptions(mode="selective")
SECOND = RecomputeOptions(every=2)
TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SEQUENCE = {"tensor": TensorOptions(sequence_parallel=True)}
COMPILED = CompileOptions(backend="aot_eager")
Case = tuple[str, dict[str, Any], dict[str, Any]]

TWO_RANKS: list[Case] = [
    ("steep_gpt", {**TP, "recompute": FULL}, CLIP),
    ("steep_gpt", {**TP, "recompute": SELECTIVE}, CLIP),
    ("steep_gpt", {**TP, **SEQUENCE, "recompute": SECOND}, CLIP),
    ("skip_gpt", TP, CLIP),  # which recomputes blocks by itself
    ("steep_gpt", {**PP, "recompute": FULL}, CLIP),
    ("steep_gpt", {**PP, "recompute": SELECTIVE, "schedule": "interleaved_1f1b"}, CLIP),
    ("steep_gpt", {**PP, "recompute": FULL, "schedule": "zbv_zero_bubble"}, CLIP),
    ("steep_gpt", {**PP, "compile": COMPILED}, CLIP),
]
FOUR_RANKS: list[Case] = [
    ("steep_gpt", {**TP, **PP, **SEQUENCE, "recompute": FULL}, CLIP),
    ("steep_gpt", {**TP, "data_parallel_shard_size": 2, "recompute": SECOND, "cpu_offload": True}, CLIP),
    ("steep_gpt", {**PP, "data_parallel_shard_size": 2, "recompute": SELECTIVE, "compile": COMPILED}, CLIP),
]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, TP),
    "pipeline": (2, PP),
    "both, sharded": (8, {**TP, **PP, "data_parallel_shard_size": 2}),
}


def with_and_without(layout: dict[str, Any], precision: str) -> list[Seen]:
    make = partial(Net, dropout=0.2)
    return [
        train_net({**layout, "recompute": recompute}, make, precision=precision)
        for recompute in (None, FULL, SELECTIVE)
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_dropout_drops_the_same(run_distributed: WorkerPool, layout: str, precision: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    for plain, *others in run_distributed(
        with_and_without, arguments, precision, world_size=world_size, timeout=SECONDS
    ):
        assert plain.losses[0] != plain.losses[-1]
        for other in others:
            assert other.losses == plain.losses
            for ours, theirs in zip(other.gradients, plain.gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            torch.testing.assert_close(other.state, plain.state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("cases", "world_size"), [(TWO_RANKS, 2), (FOUR_RANKS, 4)], ids=["two", "four"])
def test_levers_change_no_number(
    run_distributed: WorkerPool, run_single: Any, cases: list[Case], world_size: int
) -> None:
    made: dict[str, Any] = {}
    for name, _, options in cases:
        if name not in made:
            made[name] = run_single(train, name, None, options)
    found = []
    for rank, records in enumerate(run_distributed(train_all, cases, world_size=world_size, timeout=SECONDS)):
        for case, record in zip(cases, records, strict=True):
            texts = differences(record, made[case[0]], partial=True)
            found += [f"{case}, rank {rank}: {text}" for text in texts]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])
