"""Compiled blocks: the numbers of eager code, one graph per block, names as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from lightning_pardist import CompileOptions, RecomputeOptions
from tests.levers.common import Net, Seen, assert_same_run, train
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
DEPTH = 10
"""More than torch compiles of one function before it gives up."""


GRAPHS: list[Any] = []


def _counting(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return aot_eager(graph, inputs)


CASES: dict[str, tuple[dict[str, Any], str, RecomputeOptions | None]] = {
    "ddp, recomputed": ({"zero_stage": 0}, "32-true", RecomputeOptions()),
    "fsdp": ({"zero_stage": 3}, "32-true", None),
    "fsdp, offloaded, recomputed by operator, bf16": (
        {"zero_stage": 3, "cpu_offload": True},
        "bf16-mixed",
        RecomputeOptions(mode="selective"),
    ),
}


def _run(layout: dict[str, Any], precision: str, recompute: RecomputeOptions | None) -> tuple[Seen, Seen, int, int]:
    """Returns what eager code and compiled code did, how many graphs there were and how many breaks."""
    if "counting" not in torch.compiler.list_backends(()):
        register_backend(_counting, name="counting")
    make = partial(Net, depth=DEPTH, batch_norm=False)
    eager = train(layout, make, precision=precision)
    assert not GRAPHS
    compiled = {"compile": CompileOptions(backend="counting"), "recompute": recompute}
    seen = train({**layout, **compiled}, make, precision=precision)
    count = len(GRAPHS)
    GRAPHS.clear()
    return eager, seen, count, sum(counters["graph_break"].values())


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_eager_code(run_distributed: WorkerPool, name: str) -> None:
    tolerance = 1e-5 if CASES[name][1] == "32-true" else 2e-2
    for eager, seen, graphs, breaks in run_distributed(_run, *CASES[name], timeout=240.0):
        assert breaks == 0
        assert 1 <= graphs <= 8  # training and evaluation; like blocks share what was compiled for the first
        assert_same_run(seen, eager, tolerance)
