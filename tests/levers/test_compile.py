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
from tests.levers.common import Net, Seen, train
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
DEPTH = 10
"""More than torch compiles of one function before it gives up."""


GRAPHS: list[Any] = []


def _counting(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return aot_eager(graph, inputs)


def _run(layout: dict[str, Any], precision: str) -> list[tuple[Seen, int, int]]:
    if "counting" not in torch.compiler.list_backends(()):
        register_backend(_counting, name="counting")
    found = []
    compiled = CompileOptions(backend="counting")
    for arguments in (
        {},
        {"compile": compiled},
        {"compile": compiled, "recompute": RecomputeOptions()},
        {"compile": compiled, "recompute": RecomputeOptions(mode="selective")},
    ):
        torch.compiler.reset()
        GRAPHS.clear()
        seen = train({**layout, **arguments}, partial(Net, depth=DEPTH, batch_norm=False), precision=precision)
        found.append((seen, len(GRAPHS), sum(counters["graph_break"].values())))
    return found


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ({"zero_stage": 0}, "32-true"),
        ({"zero_stage": 3}, "32-true"),
        ({"zero_stage": 3, "cpu_offload": True}, "bf16-mixed"),
    ],
    ids=["ddp", "fsdp", "offloaded bf16"],
)
def test_the_numbers_of_eager_code(run_distributed: WorkerPool, layout: dict[str, Any], precision: str) -> None:
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    for (eager, none, _), *others in run_distributed(_run, layout, precision, timeout=240.0):
        assert none == 0
        for seen, graphs, breaks in others:
            assert breaks == 0
            assert 1 <= graphs <= 8  # training and evaluation; like blocks share what was compiled for the first
            assert seen.state.keys() == eager.state.keys()
            torch.testing.assert_close(seen.losses, eager.losses, rtol=tolerance, atol=tolerance)
            for name, value in eager.state.items():
                torch.testing.assert_close(seen.state[name], value, rtol=tolerance, atol=tolerance, msg=name)
