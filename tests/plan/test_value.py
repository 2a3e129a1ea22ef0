"""A plan is a value: it compares, prints, and travels as JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lightning_pardist.plan import format_plan
from lightning_pardist.specs.parallel_plan import StateBytes
from tests.plan.common import BF16_MIXED, Tower, plan_of, rows


def test_equal_modules_have_equal_plans() -> None:
    first, second = plan_of(Tower(), rows()), plan_of(Tower(), rows())
    assert first == second
    assert first.fingerprint() == second.fingerprint()
    assert first.to_json() == second.to_json()


def test_the_fingerprint_sees_every_difference() -> None:
    plans = [
        plan_of(Tower(), rows()),
        plan_of(Tower(4), rows()),
        plan_of(Tower(), rows(), shard=8),
        plan_of(Tower(), rows(), replicate=2),
        plan_of(Tower(), rows(), replicate=4, shard=1),
        plan_of(Tower(), rows(), zero_stage=2),
        plan_of(Tower(), rows(), zero_stage=1),
        plan_of(Tower(), rows(), cpu_offload=True),
        plan_of(Tower(), rows(), precision=BF16_MIXED),
        plan_of(Tower(), rows(), fsdp_units=("out",)),
    ]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_json_holds_plain_words_and_numbers() -> None:
    plan = plan_of(Tower(), rows(), precision=BF16_MIXED, optimizer_bytes=8.0)
    read = json.loads(plan.to_json())
    assert read["sizes"]["data_parallel_shard"] == 4
    assert read["precision"] == {"name": "bf16-mixed", "gather_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert [unit["modules"][0] for unit in read["data_parallel"]["units"]] == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert read["state_per_rank"]["optimizer"] == plan.state_per_rank.optimizer


def test_a_plan_cannot_be_written_to() -> None:
    plan = plan_of(Tower(), rows())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.module_class = "other"  # type: ignore[misc]


def test_the_table_says_what_people_ask() -> None:
    text = format_plan(plan_of(Tower(), rows(), replicate=2, precision=BF16_MIXED, optimizer_bytes=8.0))
    lines = text.splitlines()
    assert lines[0] == "Plan for Tower on 8 rank(s), precision bf16-mixed"
    for words in (
        ["data_parallel_replicate", "2", "copies of the model"],
        ["data_parallel_shard", "4", "ranks that share one copy"],
        ["ZeRO-3", "4 unit(s)"],
        ["3 x", "blocks.*", "freed after forward"],
        ["1 x", "root"],
        ["parameters", "each rank", "one process"],
        ["all_gather", "data_parallel_shard", "7 x"],
        ["reduce_scatter", "4 x"],
        ["all_reduce", "data_parallel_replicate", "4 x"],
    ):
        assert all(word in text for word in words), f"{words} not in\n{text}"
    assert max(map(len, lines)) <= 120


def test_an_unknown_optimizer_is_said_to_be_unknown() -> None:
    plan = plan_of(Tower(), rows())
    assert plan.state_per_rank.optimizer is None
    assert "unknown" in format_plan(plan)
    known = dataclasses.replace(plan, state_per_rank=StateBytes(parameters=1, gradients=2, optimizer=3))
    assert known.fingerprint() != plan.fingerprint()


def test_plans_of_one_rank_and_of_replicas_print_too() -> None:
    assert "nothing is sharded" in format_plan(plan_of(Tower(), rows(), shard=1))
    assert "replicated" in format_plan(plan_of(Tower(), rows(), shard=1, replicate=4))
