"""The plan made of roles: authority, patterns, heads and sizes, table and JSON."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from torch import nn

from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.plan.tensor_parallel import format_tensor_plan, make_tensor_plan
from lightning_pardist.specs.tensor_roles import TensorRoles
from tests.tensor_plan import models


@cache
def gpt(groups: int = 2) -> TensorRoles:
    blocks: list[nn.Module] = [models.Block(models.GroupedAttention(groups=groups)) for _ in range(2)]
    return derive_roles(models.GPT(blocks), models.ids(), entry="forward")


@cache
def fused() -> TensorRoles:
    blocks: list[nn.Module] = [models.Block(models.FusedAttention("split")) for _ in range(3)]
    return derive_roles(models.GPT(blocks), models.ids(), entry="forward")


def words(roles: TensorRoles, **given: Any) -> dict[str, tuple[str, str]]:
    plan = make_tensor_plan(roles, **{"size": 2, **given})
    return {entry.pattern: (entry.role, entry.source) for entry in plan.entries}


def test_the_derived_plan_has_one_entry_for_like_blocks() -> None:
    plan = make_tensor_plan(fused(), size=2)
    assert [(e.pattern, e.role, len(e.names), e.heads) for e in plan.entries] == [
        ("tokens", "vocab", 1, ""),
        ("positions", "replicate", 1, ""),
        ("blocks.*.attention.qkv", "fused_column", 3, "4 query, 4 key-value"),
        ("blocks.*.attention.out", "row", 3, "4 query, 4 key-value"),
        ("blocks.*.mlp.up", "column", 3, ""),
        ("blocks.*.mlp.down", "row", 3, ""),
    ]
    assert not plan.is_empty


def test_explicit_words_count_before_the_modules_own_and_those_before_the_derived() -> None:
    own = {"blocks.*.mlp.up": "replicate", "tokens": "replicate"}
    found = words(fused(), module_plan=own, explicit={"tokens": "vocab"})
    assert found["tokens"] == ("vocab", "explicit")
    assert found["blocks.*.mlp.up"] == ("replicate", "module")
    assert found["blocks.*.mlp.down"] == ("replicate", "derived")  # its region is open no longer
    assert found["blocks.*.attention.qkv"] == ("fused_column", "derived")


def test_blocks_that_differ_are_told_apart() -> None:
    plan = make_tensor_plan(
        fused(), size=2, explicit={"blocks.1.mlp.up": "replicate", "blocks.1.mlp.down": "replicate"}
    )
    found = {(entry.pattern, entry.role): entry.names for entry in plan.entries if "mlp.up" in entry.pattern}
    assert found == {
        ("blocks.*.mlp.up", "column"): ("blocks.0.mlp.up", "blocks.2.mlp.up"),
        ("blocks.1.mlp.up", "replicate"): ("blocks.1.mlp.up",),
    }


class SharedNorm(nn.Module):
    """One norm over the head dim for the queries of two attentions, or for one attention and whole tensors."""

    def __init__(self, *, is_whole_elsewhere: bool) -> None:
        super().__init__()
        self.is_whole_elsewhere = is_whole_elsewhere
        self.first, self.second = (models.GroupedAttention(norm="head") for _ in range(2))
        self.norm = self.first.q_norm
        self.second.q_norm = nn.Identity() if is_whole_elsewhere else self.norm

    def forward(self, x: Any) -> Any:
        x = self.second(self.first(x))
        return self.norm(x.unflatten(-1, (-1, models.HEAD_DIM))) if self.is_whole_elsewhere else x


def test_a_whole_parameter_is_summed_where_all_its_uses_are_on_shares() -> None:
    roles = derive_roles(SharedNorm(is_whole_elsewhere=False), models.hidden(), entry="forward")
    plan = make_tensor_plan(roles, size=2)
    assert sorted(plan.partial_parameters) == [
        "first.k_norm.weight", "first.q_norm.weight", "second.k_norm.weight",
    ]  # fmt: skip
    left = make_tensor_plan(roles, size=2, explicit={"first.out": "replicate"})
    assert left.is_empty and left.partial_parameters == ()
    (note,) = (entry.note for entry in left.entries if entry.pattern == "second.out")
    assert note == "first.q_norm.weight, which it uses whole, is used on whole tensors too"


def test_a_whole_parameter_that_is_used_on_whole_tensors_too_keeps_its_region_whole() -> None:
    roles = derive_roles(SharedNorm(is_whole_elsewhere=True), models.hidden(), entry="forward")
    plan = make_tensor_plan(roles, size=2)
    assert {entry.pattern: entry.role for entry in plan.entries} == {
        **{f"first.{name}": "replicate" for name in ("q", "k", "v", "out")},
        **{f"second.{name}": "column" for name in ("q", "k", "v")},
        "second.out": "row",
    }
    assert plan.partial_parameters == ("second.k_norm.weight",)


@pytest.mark.parametrize("argument", ["explicit", "module_plan"])
def test_a_pattern_that_matches_nothing(argument: str) -> None:
    source = "the strategy's `plan`" if argument == "explicit" else r"the module's `tensor_parallel_plan\(\)`"
    with pytest.raises(
        ValueError,
        match=r"must match a linear layer.*\n  Got: 'blocks\.\*\.ffn\.up', which matches none in GPT\n"
        rf"  From: {source}\n  Change: .*there are: tokens, positions, blocks\.\*\.attention\.qkv",
    ):
        make_tensor_plan(fused(), size=2, **{argument: {"blocks.*.ffn.up": "column"}})


def test_an_unknown_word() -> None:
    with pytest.raises(
        ValueError, match=r"one of the words column, row.*\n  Got: 'tokens': 'colwise'\n  From: .*\n  Change"
    ):
        make_tensor_plan(fused(), size=2, explicit={"tokens": "colwise"})


@pytest.mark.parametrize(
    ("pattern", "word", "rule"),
    [
        ("blocks.*.mlp.up", "fused_column", "needs to know the parts"),
        ("blocks.*.attention.qkv", "column", "cannot be sharded as one"),
        ("positions", "row", "no input features"),
    ],
)
def test_words_that_a_weight_cannot_have(pattern: str, word: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"{rule}.*\n  Got: {word} for .*\n  From: .*\n  Change: use"):
        make_tensor_plan(fused(), size=2, explicit={pattern: word})


def test_heads_that_divide_and_those_that_do_not() -> None:
    by_size = {size: make_tensor_plan(gpt(), size=size) for size in (1, 2, 4)}
    attention = {size: plan.fits[0] for size, plan in by_size.items()}
    assert all(fit.pattern == "blocks.*.attention.out" for fit in attention.values())
    assert (attention[2].is_even, attention[2].shards, attention[2].key_value_copies) == (True, (1, 1), 1)
    assert (attention[4].is_even, attention[4].shards, attention[4].key_value_copies) == (True, (1,) * 4, 2)
    assert "blocks.*.attention.out: 2 key-value head(s) for 4 ranks, each held by 2 of them" in by_size[4].notes
    assert "vocabulary of 97: uneven over 2 ranks" in by_size[2].notes
    assert by_size[1].notes == ()


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_cannot_be_dealt_out(size: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s)whole query heads.*4 query head.*2 key-value.*size={size}.*replicate"):
        make_tensor_plan(gpt(), size=size)


def test_mlp_widths_that_do_not_divide() -> None:
    whole = {"blocks.*.attention.*": "replicate"}
    (mlp,) = make_tensor_plan(gpt(), size=5, explicit=whole).fits
    assert (mlp.is_even, mlp.shards) == (False, (20, 19, 19, 19, 19))


def test_a_module_with_nothing_to_shard_has_an_empty_plan() -> None:
    roles = derive_roles(nn.Sequential(nn.Linear(24, 8), nn.Softmax(-1)), models.hidden(), entry="forward")
    plan = make_tensor_plan(roles, size=2)
    assert plan.is_empty
    assert plan.entries[0].note == "softmax mixes along it"


def test_plan_as_table_and_json() -> None:
    plan = make_tensor_plan(fused(), size=2)
    assert format_tensor_plan(plan).splitlines() == [
        "Tensor-parallel plan for GPT on 2 rank(s)",
        "  weight                  role          from     count  parts         heads                 why",
        "  tokens                  vocab         derived  1 x",
        "  positions               replicate     derived  1 x"
        + " " * 40
        + "an embedding that is not over the vocabulary",
        "  blocks.*.attention.qkv  fused_column  derived  3 x    24 + 24 + 24  4 query, 4 key-value",
        "  blocks.*.attention.out  row           derived  3 x                  4 query, 4 key-value",
        "  blocks.*.mlp.up         column        derived  3 x",
        "  blocks.*.mlp.down       row           derived  3 x",
        "  note: vocabulary of 97: uneven over 2 ranks",
    ]
    assert json.loads(plan.to_json())["entries"][2]["parts"] == [24, 24, 24]
    assert (
        plan.fingerprint()
        == make_tensor_plan(fused(), size=2).fingerprint()
        != make_tensor_plan(fused(), size=4).fingerprint()
    )
