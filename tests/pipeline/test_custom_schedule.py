"""A schedule of one's own, from a file as torch writes it, trains to the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.runs import differences
from tests.pipeline.runs import train, train_all
from tests.support.pool import WorkerPool

CLIP = {"gradient_clip_val": 0.1}
ORDERS = {
    "late backward": "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n",
    "split backward": "0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W1,0W2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n",
}


def test_orders_from_files(run_distributed: WorkerPool, run_single: Any, tmp_path: Path) -> None:
    cases = []
    for name, orders in ORDERS.items():
        path = tmp_path / f"{name}.csv"
        path.write_text(orders)
        cases.append(("steep_gpt", {"pipeline_parallel_size": 2, "schedule": str(path)}, CLIP))
    want = run_single(train, "steep_gpt", None, CLIP)
    for rank, records in enumerate(run_distributed(train_all, cases)):
        for name, record in zip(ORDERS, records, strict=True):
            found = differences(record, want, partial=True)
            assert not found, (name, rank, found[:10])
