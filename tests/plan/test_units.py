"""Which parameters are gathered together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import default_collate

from tests.plan.common import BF16_MIXED, Tower, modules_of, plan_of, root_of, rows
from tests.support.marks import NEEDS_TRANSFORMERS
from tests.support.modules import MODULES


def batch_of(module: Any, count: int = 4) -> Any:
    data = module.dataset(count, seed=1)
    return default_collate([data[index] for index in range(count)])


@pytest.mark.parametrize("observed", [True, False], ids=["run", "tree"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_TRANSFORMERS if name == "llama" else ()) for name in MODULES]
)
def test_every_parameter_has_exactly_one_place(name: str, observed: bool) -> None:
    module = MODULES[name]()
    batch = batch_of(module) if observed and name != "routed_experts" else None
    plan = plan_of(module, batch).data_parallel
    held = [name for unit in plan.units for name in unit.parameters]
    held += [*plan.scalar_parameters, *plan.ignored_parameters]
    assert sorted(held) == sorted(name for name, _ in module.named_parameters())
    assert plan.units[-1].is_root and not any(unit.is_root for unit in plan.units[:-1])
    _check_inner_before_outer([unit.modules for unit in plan.units])
    _check_ties(module, plan.units)


def _check_inner_before_outer(units: list[tuple[str, ...]]) -> None:
    for index, modules in enumerate(units):
        for earlier in units[:index]:
            for name in modules:
                assert not any(name.startswith(f"{outer}.") for outer in earlier if outer)


def _check_ties(module: nn.Module, units: Any) -> None:
    """All modules that own a parameter lie inside the modules of the one unit that holds it."""
    first = {id(p): name for name, p in module.named_parameters()}
    owners: dict[str, set[str]] = {}
    for owner, child in module.named_modules(remove_duplicate=False):
        for parameter in child.parameters(recurse=False):
            owners.setdefault(first[id(parameter)], set()).add(owner)
    for unit in units:
        if unit.is_root:
            continue
        for name in unit.parameters:
            for owner in owners[name]:
                objects = [module.get_submodule(m) for m in unit.modules]
                assert any(module.get_submodule(owner) in top.modules() for top in objects), (name, owner)


def test_blocks_are_units_and_the_rest_is_the_roots() -> None:
    plan = plan_of(Tower(), rows())
    assert modules_of(plan) == [("blocks.0",), ("blocks.1",), ("blocks.2",), ("",)]
    assert root_of(plan).parameters == ("inp.weight", "inp.bias", "out.weight", "out.bias")
    assert modules_of(plan_of(Tower())) == modules_of(plan)  # the tree alone tells as much


@pytest.mark.parametrize(("stage", "freed"), [(1, False), (2, False), (3, True)])
def test_only_stage_3_frees_after_forward(stage: int, freed: bool) -> None:
    units = plan_of(Tower(), rows(), zero_stage=stage).data_parallel.units
    assert [unit.reshard_after_forward for unit in units] == [freed] * 3 + [False]


class Tied(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.head(self.emb(x.long()[:, 0])))


def test_tied_embedding_and_head_stay_together_with_the_root() -> None:
    plan = plan_of(Tied(), rows())
    assert "emb.weight" in root_of(plan).parameters
    assert "emb.weight" not in {name for unit in plan.data_parallel.units[:-1] for name in unit.parameters}


def test_a_pattern_draws_in_what_is_tied() -> None:
    plan = plan_of(Tied(), rows(), fsdp_units=("emb",))
    assert modules_of(plan) == [("emb", "head"), ("",)]
    assert plan.data_parallel.units[0].parameters == ("emb.weight",)


def test_patterns_by_class_and_by_name() -> None:
    assert modules_of(plan_of(Tower(), rows(), fsdp_units=("Sequential",)))[:-1] == [(f"blocks.{i}",) for i in range(3)]
    assert modules_of(plan_of(Tower(), rows(), fsdp_units=("blocks.[01]", "out"))) == [
        ("blocks.0",),
        ("blocks.1",),
        ("out",),
        ("",),
    ]


def test_nested_units_are_applied_inner_first() -> None:
    plan = plan_of(Tower(1), rows(), fsdp_units=("blocks.0", "blocks.0.0"))
    assert modules_of(plan) == [("blocks.0.0",), ("blocks.0",), ("",)]
    assert plan.data_parallel.units[1].parameters == ("blocks.0.1.weight", "blocks.0.1.bias")


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)'blocks.7' matches nothing.*Linear"):
        plan_of(Tower(), rows(), fsdp_units=("blocks.*", "blocks.7"))
    with pytest.raises(ValueError, match="matches nothing"):
        plan_of(Tower(), rows(), shard=1, replicate=2, fsdp_units=("nope",))


class Touched(Tower):
    """A penalty on one block's weight, outside the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[1][0].weight.square().sum()


def test_a_block_that_outside_code_touches_is_no_unit() -> None:
    plan = plan_of(Touched(), rows())
    assert modules_of(plan) == [("blocks.0",), ("blocks.2",), ("",)]
    assert any("blocks.1" in note for note in plan.data_parallel.notes)


class Measured(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()
        self.metric.inner = nn.Linear(2, 2)


def test_parameters_of_metrics_are_left_alone() -> None:
    plan = plan_of(Measured(), rows()).data_parallel
    assert plan.ignored_parameters == ("metric.inner.weight", "metric.inner.bias")
    assert not {name for unit in plan.units for name in unit.parameters} & set(plan.ignored_parameters)


class Normed(Tower):
    def block(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


def test_batch_norms_keep_their_precision() -> None:
    full = plan_of(Normed(), rows())
    assert not any(unit.full_precision for unit in full.data_parallel.units)
    mixed = plan_of(Normed(), rows(), precision=BF16_MIXED).data_parallel.units
    (norms,) = [unit for unit in mixed if unit.full_precision]
    assert norms.modules == ("blocks.0.1", "blocks.1.1", "blocks.2.1")
    assert len(norms.parameters) == 6


class Large(nn.Module):
    """No stack: a big first layer, middling ones, one that is tiny, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 48)
        self.tiny, self.third, self.never = nn.Linear(1, 1), nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x))) + self.tiny(x[:, :1])


def test_without_a_stack_modules_are_cut_by_size() -> None:
    plan = plan_of(Large(), (torch.zeros(2, 64),))
    assert modules_of(plan) == [("first",), ("second",), ("third",), ("",)]
    assert set(root_of(plan).parameters) == {"tiny.weight", "tiny.bias", "never.weight", "never.bias"}
    # Nobody knows from the tree what is called: one unit, and the plan says so.
    tree = plan_of(Large())
    assert modules_of(tree) == [("",)]
    assert any("one unit" in note for note in tree.data_parallel.notes)


def test_frozen_modules_are_planned_for_evaluation_only() -> None:
    module = Tower().requires_grad_(False)
    assert modules_of(plan_of(module, rows(), training=False)) == modules_of(plan_of(Tower(), rows()))
    with pytest.raises(ValueError, match="all 16 parameters of Tower are frozen"):
        plan_of(module, rows())


def test_dtypes_that_cannot_be_reduced_together() -> None:
    module = Tower()
    module.blocks[1][0].double()
    with pytest.raises(ValueError, match=r"(?s)one dtype.*blocks\.1"):
        plan_of(module)
    module.blocks[1][0].requires_grad_(False)
    plan_of(module)  # a frozen parameter is not reduced


def test_one_data_rank_needs_no_units() -> None:
    plan = plan_of(Tower(), rows(), shard=1).data_parallel
    assert (plan.kind, plan.units) == ("none", ())


def test_the_reducer_looks_for_unused_parameters_only_if_there_may_be_some() -> None:
    assert not plan_of(Tower(), rows(), replicate=2, shard=1).data_parallel.find_unused_parameters
    assert plan_of(Tower(), replicate=2, shard=1).data_parallel.find_unused_parameters  # nobody could look
    unused = plan_of(Large(), (torch.zeros(2, 64),), replicate=2, shard=1).data_parallel
    assert unused.find_unused_parameters
    assert any("never.weight" in note for note in unused.notes)
