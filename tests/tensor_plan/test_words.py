"""Words and torch's styles of a user's plan: what they come to, and what is refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lightning_pardist.describe import profile_model
from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.plan import make_tensor_plan, with_sequence_parallel
from lightning_pardist.plan.tensor_words import check_positions, sequence_words
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import TensorRoles
from lightning_pardist.strategies.tensor_styles import without_styles
from tests.tensor_plan import models


class Gated(nn.Module):
    """A region, and two layers that the flow of data keeps whole: a softmax is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.GPT([models.Block(models.GroupedAttention()) for _ in range(2)], tied=False)
        self.gate, self.out = nn.Linear(models.WIDTH, 8), nn.Linear(8, models.WIDTH)

    def forward(self, ids: Any) -> Any:
        return self.net(ids), self.out(self.gate(self.net.tokens(ids)).softmax(-1))


@cache
def described() -> tuple[TensorRoles, ModelProfile]:
    module = Gated()
    return derive_roles(module, models.ids(), entry="forward"), profile_model(module, models.ids(), entry="forward")


def planned(plan: dict[str, Any]) -> TensorPlan:
    return make_tensor_plan(described()[0], size=2, explicit=without_styles(plan, "explicit"))


def test_styles_are_translated() -> None:
    """The plan that torch's tutorial gives a Llama, with and without Shard(1)."""
    for positions in (Replicate(), Shard(1)):
        plan = {
            "net.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
            "net.blocks.*.attention.q": ColwiseParallel(),
            "net.blocks.*.attention.out": RowwiseParallel(output_layouts=positions),
            "net.blocks.*.mlp.up": ColwiseParallel(use_local_output=False),
            "net.blocks.*.mlp.down": RowwiseParallel(output_layouts=positions),
            "net.head": ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
        }
        found = {entry.pattern: (entry.role, entry.source) for entry in planned(plan).entries}
        assert found == {
            "net.tokens": ("vocab", "explicit"),
            "net.positions": ("replicate", "derived"),
            "net.blocks.*.attention.q": ("column", "explicit"),
            "net.blocks.*.attention.k": ("column", "derived"),
            "net.blocks.*.attention.v": ("column", "derived"),
            "net.blocks.*.attention.out": ("row", "explicit"),
            "net.blocks.*.mlp.up": ("column", "explicit"),
            "net.blocks.*.mlp.down": ("row", "explicit"),
            "net.head": ("vocab", "explicit"),
            "gate": ("replicate", "derived"),
            "out": ("replicate", "derived"),
        }
        words = {"explicit": without_styles(plan, "explicit")}
        check_positions(words, is_sharded=True)
        if positions == Shard(1):
            with pytest.raises(ValueError, match=r"(?s)needs sequence parallel.*'net\.tokens'.*Change: .*=True"):
                check_positions(words, is_sharded=False)


@pytest.mark.parametrize(
    ("pattern", "style", "words"),
    [
        (
            "net.tokens",
            ColwiseParallel(),
            r"ColwiseParallel\(input_layouts=R.*for an embedding",
        ),
        ("net.blocks.*.mlp.down", RowwiseParallel(input_layouts=Replicate()), r"input_layouts=R.* for a linear layer"),
        ("net.blocks.*.mlp.up", ColwiseParallel(output_layouts=Shard(1)), r"output_layouts=S\(1\)"),
        ("net.blocks.*.mlp", PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()), "Prepare"),
        ("net.blocks.*.mlp.up", 3, "int"),
    ],
)
def test_styles_that_no_region_gives(pattern: str, style: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)torch.*Got: '{pattern}'.*{words}.*\n  From: the strategy.*\n  Change"):
        planned({pattern: style})


@pytest.mark.parametrize(
    ("plan", "rule", "got"),
    [
        ({"net.positions": "column"}, "no input features", "column for net.positions"),
        (
            {"net.blocks.0.mlp.up": "replicate", "net.blocks.0.mlp.down": "row"},
            "as a whole or not at all",
            r"row for net\.blocks\.0\.mlp\.down, and replicate for",
        ),
        ({"gate": "column"}, "must be closed by a row layer", "column for gate, and no row layer"),
        ({"out": "row"}, "opened by a column layer", "row for out, and no column layer"),
    ],
)
def test_words_that_leave_shares_without_an_end(plan: dict[str, str], rule: str, got: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){rule}.*\n  Got: {got}.*\n  From: .*\n  Change: "):
        planned(plan)


def test_layers_that_are_named_against_the_flow_of_data_are_taken_at_their_word() -> None:
    plan = planned({"gate": "column", "out": "row"})
    assert dict(plan.uses)["gate.weight"] == "column"
    assert "gate: taken at the word given for it; the probe does not reach it, verify='full' does" in plan.notes


def test_sequence_shards_the_stack_around_what_it_names() -> None:
    roles, profile = described()
    for given in ("sequence", SequenceParallel()):
        words = sequence_words({"module": without_styles({"net.blocks.*.norm_1": given}, "module")})
        plan = with_sequence_parallel(make_tensor_plan(roles, size=2), profile, words, everywhere=False)
        (stack,) = plan.sequence_stacks
        assert stack.blocks == ("net.blocks.0", "net.blocks.1")
        assert plan.notes[-1] == (
            "net.blocks.*.norm_1: on shares of the sequence, as the module's `tensor_parallel_plan()` says"
        )


@pytest.mark.parametrize(
    ("pattern", "given", "words"),
    [
        ("net.norm", "sequence", "net.norm, which is outside every stack"),
        (
            "net.blocks.*.mlp.up",
            "sequence",
            r"net\.blocks\.0\.mlp\.up, which is inside the region of net",
        ),
        ("net.blocks.*.norm_9", "sequence", "matches no module that the step calls"),
        ("net.blocks.*.norm_1", SequenceParallel(sequence_dim=0), "sequence_dim=0; its positions are in dim 1"),
    ],
)
def test_sequence_for_what_has_all_positions(pattern: str, given: Any, words: str) -> None:
    roles, profile = described()
    found = sequence_words({"explicit": without_styles({pattern: given}, "explicit")})
    with pytest.raises(ValueError, match=rf"(?s)between the regions.*\n  Got: .*{words}.*\n  From: .*\n  Change: "):
        with_sequence_parallel(make_tensor_plan(roles, size=2), profile, found, everywhere=False)
