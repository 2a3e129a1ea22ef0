"""Orders of actions and their idle shares: golden figures of the design, on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pardist import torch_schedules_api as api
from lightning_pardist.plan.schedule_simulator import simulate
from lightning_pardist.specs.pipeline_plan import Orders

WORLDS = ((2, 8), (4, 8), (4, 16), (8, 32))
GOLDEN: dict[str, tuple[int, tuple[float, ...], tuple[float, float]]] = {
    "gpipe": (1, (11.11, 27.27, 15.79, 17.95), (16, 32)),
    "1f1b": (1, (11.11, 27.27, 15.79, 17.95), (4, 8)),
    "interleaved_1f1b": (2, (5.88, 15.79, 8.57, 9.86), (5.5, 11.5)),
    "looped_bfs": (2, (5.88, 15.79, 8.57, 9.86), (16, 32)),
    "interleaved_zero_bubble": (2, (2.04, 5.88, 3.03, 3.52), (4, 8)),
    "zbv_zero_bubble": (2, (2.04, 5.88, 3.03, 3.52), (4, 8)),
    "dualpipev": (2, (4.00, 11.11, 5.88, 6.80), (4.5, 8.5)),
}
"""Stages per rank, idle shares in per cent by world, live micro-batches on 4 and 8 ranks."""


@pytest.mark.parametrize("schedule", GOLDEN)
def test_idle_share_and_live_micro_batches(schedule: str) -> None:
    per_rank, shares, alive = GOLDEN[schedule]
    runs = [simulate(api.orders_of(schedule, ranks, per_rank, micros)) for ranks, micros in WORLDS]
    assert [round(100 * run.idle_share, 2) for run in runs] == pytest.approx(shares, abs=0.006)
    assert (runs[2].most_alive(per_rank), runs[3].most_alive(per_rank)) == alive


def test_orders_are_complete_and_placed_as_told() -> None:
    for schedule, (per_rank, _, _) in GOLDEN.items():
        orders = api.orders_of(schedule, 4, per_rank, 8)
        for rank, actions in orders.items():
            assert {api.rank_of_stage(schedule, stage, 4) for stage, _, _ in actions} == {rank}
            forwards = [(stage, micro) for stage, kind, micro in actions if kind in "FO"]
            halves = {kind: [(s, m) for s, k, m in actions if k == kind] for kind in "BIW"}
            assert sorted(forwards) == sorted(halves["B"] + halves["I"])
            assert sorted(halves["I"]) == sorted(halves["W"])


def test_one_forward_one_backward_in_letters() -> None:
    lines = simulate(api.orders_of("1f1b", 4, 1, 8)).lines()
    assert lines[0] == "abcd......AAeBBfCCgDDhEE.FF.GG.HH"
    assert lines[3] == "...aAAbBBcCCdDDeEEfFFgGGhHH......"


def test_a_file_holds_any_order(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    orders = api.orders_from_file(str(path))
    assert orders[1] == ((1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1))
    path.write_text("0F0,what\n")
    with pytest.raises(ValueError, match="what"):
        api.orders_from_file(str(path))


def test_a_circle_is_told() -> None:
    orders: Orders = {0: ((0, "B", 0), (0, "F", 0)), 1: ((1, "F", 0), (1, "B", 0))}
    with pytest.raises(ValueError, match="every rank waits"):
        simulate(orders)
