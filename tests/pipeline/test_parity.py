"""The judge of pipelines: every schedule, every odd module, against the unchanged module in one process.

Losses and all logged values after every batch and validation, gradients before and after clipping, learning rates and
weights agree to 1e-5 on every rank; batches are cut into eight micro-batches, the last batch of an epoch is ragged, and
a validation with another number of rows lies in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parity.runs import Record, differences
from tests.pipeline.runs import train, train_all
from tests.support.marks import NEEDS_TRANSFORMERS
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
SECONDS = 250.0
CLIP = {"gradient_clip_val": 0.1}
BOTH = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
TWO = {"pipeline_parallel_size": 2}
FOUR = {"pipeline_parallel_size": 4}
WITH_FSDP = {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}
SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev",
)  # fmt: skip
Case = tuple[str, dict[str, Any], dict[str, Any]]

GROUPS: dict[str, tuple[int, list[Case]]] = {
    "schedules on two stages": (2, [("gpt4", {**TWO, "schedule": s}, CLIP) for s in SCHEDULES]),
    "schedules on four stages": (
        4,
        [("gpt4", {**FOUR, "schedule": s}, BOTH) for s in SCHEDULES],
    ),
    "modules": (
        2,
        [
            (name, TWO, CLIP)
            for name in ("vit", "encoder", "convnet", "dense", "many_states", "seq2seq", "weight_penalty")
        ],
    ),
    "shared tables and writes in place": (
        2,
        [
            ("tables", TWO, CLIP),
            ("in_place", TWO, CLIP),
            ("in_place", {**TWO, "schedule": "interleaved_1f1b"}, BOTH),
        ],
    ),
    "tied, skipping and frozen": (
        2,
        [
            ("gpt", TWO, BOTH),
            ("skip_gpt", TWO, BOTH),
            ("shared_weights", TWO, CLIP),
            ("frozen_start", {**TWO, "schedule": "interleaved_zero_bubble"}, CLIP),
            ("many_states", {**TWO, "schedule": "interleaved_zero_bubble"}, CLIP),
        ],
    ),
    "four stages of odd steps": (
        4,
        [("skip_gpt", FOUR, CLIP), ("idle", FOUR, CLIP), ("many_states", FOUR, BOTH), ("dense", FOUR, CLIP)],
    ),
    "with sharded and replicated stages": (
        4,
        [
            ("gpt4", {**WITH_FSDP, "zero_stage": 3}, BOTH),
            ("gpt4", {**WITH_FSDP, "zero_stage": 1}, BOTH),
            ("gpt4", {**WITH_FSDP, "schedule": "zbv_zero_bubble"}, CLIP),
            ("skip_gpt", {**TWO, "zero_stage": 0}, BOTH),
        ],
    ),
    "transformers": (
        2,
        [(name, TWO, BOTH) for name in ("llama", "gpt2", "t5")]
        + [("t5", {**TWO, "schedule": "zbv_zero_bubble"}, CLIP)],
    ),
}


@pytest.fixture(scope="module")
def reference(run_single: Callable[..., Any]) -> Callable[[str, dict[str, Any]], Record]:
    """The run of the unchanged module in one process, made once per module and Trainer arguments."""
    made: dict[str, Record] = {}

    def run(name: str, options: dict[str, Any]) -> Record:
        key = f"{name} {options}"
        if key not in made:
            made[key] = run_single(train, name, None, options)
        return made[key]

    return run


def _marked(name: str) -> Any:
    return pytest.param(name, marks=NEEDS_TRANSFORMERS if name == "transformers" else ())


@pytest.mark.parametrize("group", [_marked(name) for name in GROUPS])
def test_stages_equal_one_process(run_distributed: WorkerPool, reference: Any, group: str) -> None:
    world_size, cases = GROUPS[group]
    wanted = [reference(name, options) for name, _, options in cases]
    found = []
    for rank, records in enumerate(run_distributed(train_all, cases, world_size=world_size, timeout=SECONDS)):
        for case, record, want in zip(cases, records, wanted, strict=True):
            found += [f"{case}, rank {rank}: {text}" for text in differences(record, want, partial=True)]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])
