"""What public models do that plans went wrong on: trained on two ranks, and on four where heads get scarce."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pool import WorkerPool
from tests.tensor_parallel.odd_models import MODELS
from tests.tensor_parallel.test_parity import FOUR, TWO, check


@pytest.mark.timeout(300)
def test_two_ranks(run_distributed: WorkerPool, run_single: Any) -> None:
    check(run_distributed, run_single, [(name, TWO, {}) for name in MODELS], 2)


@pytest.mark.timeout(300)
def test_four_ranks(run_distributed: WorkerPool, run_single: Any) -> None:
    check(run_distributed, run_single, [(name, FOUR, {}) for name in ("sinks", "room", "checked", "own width")], 4)
