"""Modules that cannot be spread: refused on all ranks, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.bad_input.common import check, fit, loader, trainer
from tests.support.modules import WIDTH, Regression, ResidualBlock, WeightPenalty
from tests.support.pool import WorkerPool

STAGES = [{"zero_stage": stage} for stage in (0, 1, 2, 3)]


class NoParameters(Regression):
    def build(self) -> nn.Module:
        return nn.Flatten(0)

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def configure_optimizers(self) -> Any:
        return None


class Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wrapped(Regression):
    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__()

    def build(self) -> nn.Module:
        net = super().build()
        if self.how == "ddp":
            return DistributedDataParallel(net)
        if self.how == "fsdp1":
            return FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        return fully_shard(net)


class WrappedInConfigureModel(Regression):
    def configure_model(self) -> None:
        self.net[0] = fully_shard(self.net[0])


class DifferentByRank(Regression):
    """How ranks' modules may differ: a shape, a dtype, a further layer, what is frozen, a buffer."""

    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__()

    def build(self) -> nn.Module:
        odd = dist.get_rank() == 1
        width = 20 if odd and self.how == "shape" else 18
        layers: list[nn.Module] = [nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, 1)]
        if odd and self.how == "more":
            layers.append(nn.Linear(1, 1))
        net = nn.Sequential(*layers)
        if odd and self.how == "dtype":
            net.double()
        if odd and self.how == "frozen":
            net[0].bias.requires_grad_(False)
        if odd and self.how == "buffer":
            net[1].register_buffer("seen", torch.zeros(3))
        return net


class EmptyOnOneRank(Regression):
    def build(self) -> nn.Module:
        return nn.Linear(WIDTH, 1) if dist.get_rank() == 0 else nn.Flatten(1)


def fit_made(strategy: Any, make: type, *args: Any) -> None:
    fit(strategy, make(*args))


def test_no_parameters(run_distributed: WorkerPool) -> None:
    cases = [(fit_made, (stage, NoParameters), "NoParameters has none") for stage in STAGES]
    check(run_distributed, cases)


def test_all_frozen_is_refused_by_fit(run_distributed: WorkerPool) -> None:
    cases: list[Any] = [(fit_made, (stage, Frozen), "all 4 parameters of Frozen are frozen") for stage in STAGES]
    cases.append((validate_then_fit, ({},), "parameters are frozen|parameters of Frozen are frozen"))
    check(run_distributed, cases)


def validate_then_fit(strategy: Any) -> None:
    module, used = Frozen(), trainer(strategy)
    used.validate(module, loader(module), verbose=False)
    used.fit(module, loader(module))


def validate_frozen(stage: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    module = Frozen()
    batch_size = 2 if dist.is_initialized() else 4
    (metrics,) = trainer(stage).validate(module, loader(module, batch_size=batch_size), verbose=False)
    return dict(metrics)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_all_frozen_can_be_validated(run_distributed: WorkerPool, run_single: Any, stage: dict[str, Any]) -> None:
    want = run_single(validate_frozen, {})["val_loss"]
    for metrics in run_distributed(validate_frozen, stage):
        assert metrics["val_loss"] == pytest.approx(want, rel=1e-5)


def test_modules_that_are_spread_already(run_distributed: WorkerPool) -> None:
    cases: list[Any] = []
    for stage in ({"zero_stage": 0}, {"zero_stage": 3}):
        cases += [
            (fit_made, (stage, Wrapped, "ddp"), "net is a DistributedDataParallel"),
            (fit_made, (stage, Wrapped, "fsdp1"), "net is a FullyShardedDataParallel"),
            (fit_made, (stage, Wrapped, "fully_shard"), "net is a FSDP"),
            (fit_made, (stage, WrappedInConfigureModel), r"net\.0 is a FSDP"),
        ]
    check(run_distributed, cases)


def test_ranks_that_build_different_modules(run_distributed: WorkerPool) -> None:
    first = r"parameter net\.0\.weight \(18, 24\) torch\.float32"
    cases: list[Any] = [
        (fit_made, ({}, DifferentByRank, "shape"), rf"rank 0 has {first}.*rank 1 has .*net\.0\.weight \(20, 24\)"),
        (fit_made, ({}, DifferentByRank, "dtype"), rf"rank 0 has {first}.*rank 1 has .*net\.0\.weight .*float64"),
        (fit_made, ({}, DifferentByRank, "more"), r"rank 1 has .*net\.3\.weight"),
        (fit_made, ({}, DifferentByRank, "frozen"), r"net\.0\.bias .*grad=True.*net\.0\.bias .*grad=False"),
        (fit_made, ({}, DifferentByRank, "buffer"), r"rank 1 has buffer net\.1\.seen"),
        (fit_made, ({"zero_stage": 0}, DifferentByRank, "shape"), r"\(20, 24\)"),
        (fit_made, ({}, EmptyOnOneRank), r"rank 1 has"),
        (fit_made, ({"zero_stage": 0}, EmptyOnOneRank), r"rank 1 has"),
    ]
    check(run_distributed, cases)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_patterns_that_match_nothing(run_distributed: WorkerPool, stage: int) -> None:
    def units(*names: str) -> dict[str, Any]:
        return {"zero_stage": stage, "fsdp_units": list(names)}

    cases: list[Any] = [
        (fit_made, (units("Blok"), WeightPenalty), "'Blok' matches nothing.*ResidualBlock"),
        (fit_made, (units("ResidualBlock", "layers.*"), WeightPenalty), "'layers.*' matches nothing"),
        (fit_made, (units("GELU"), Regression), "'GELU' matches nothing"),  # it has no parameters
    ]
    check(run_distributed, cases)


def fit_with_units() -> int:
    module = NamedBlocks()
    used = trainer({"fsdp_units": ["ResidualBlock"]})
    used.fit(module, loader(module))
    return len(used.strategy.plan.data_parallel.units)


class NamedBlocks(Regression):
    def build(self) -> nn.Module:
        return nn.Sequential(ResidualBlock(), ResidualBlock(), nn.Linear(WIDTH, 1))


def test_patterns_that_match_are_the_units(run_distributed: WorkerPool) -> None:
    assert run_distributed(fit_with_units) == [3, 3]  # two blocks and the root


def fit_compiled(strategy: Any) -> None:
    module = Regression()
    compiled = torch.compile(module, backend="eager")
    trainer(strategy).fit(compiled, loader(module))


def fit_compiled_in_place(strategy: Any) -> None:
    module = Regression()
    module.compile(backend="eager")
    trainer(strategy).fit(module, loader(module))


def test_compiled_modules(run_distributed: WorkerPool) -> None:
    cases = [
        (fit_compiled, ({"zero_stage": 3},), r"must not be compiled.*compile=True"),
        (fit_compiled, ({"zero_stage": 0},), r"must not be compiled.*compile=True"),
        (fit_compiled, ("pardist_fsdp",), r"must not be compiled.*compile=True"),
        (fit_compiled_in_place, ({"zero_stage": 3},), r"must not be compiled.*compile=True"),
    ]
    check(run_distributed, cases)


class WithLBFGS(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class WithForeignParameters(Regression):
    """Collects its parameters in the constructor, before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.collected, lr=0.1)


def test_optimizers_that_shards_cannot_serve(run_distributed: WorkerPool) -> None:
    cases: list[Any] = [(fit_made, ({"zero_stage": stage}, WithLBFGS), "optimizer 0 is LBFGS") for stage in (1, 2, 3)]
    cases += [
        (fit_made, ({"zero_stage": stage}, WithForeignParameters), r"holds 4 other tensor.*configure_optimizers")
        for stage in (1, 3)
    ]
    check(run_distributed, cases)


class MixedDtypes(Regression):
    """Two trained dtypes in what would be one unit."""

    def build(self) -> nn.Module:
        net = super().build()
        net[2].bias = nn.Parameter(net[2].bias.detach().double())
        return net

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net[1](self.net[0](x))
        return nn.functional.linear(hidden, self.net[2].weight, self.net[2].bias.float()).squeeze(-1)


def test_trained_dtypes_that_differ_in_one_unit(run_distributed: WorkerPool) -> None:
    check(run_distributed, [(fit_made, ({}, MixedDtypes), r"one dtype.*float64")])


def reuse_in_another_layout() -> None:
    module = Regression()
    trainer({"zero_stage": 3}).fit(module, loader(module))
    trainer({"zero_stage": 2}).fit(module, loader(module))


def test_a_module_keeps_its_layout(run_distributed: WorkerPool) -> None:
    check(run_distributed, [(reuse_in_another_layout, (), r"keeps the layout.*zero_stage=3.*zero_stage=2|with 2")])


def lazy() -> None:
    class Lazy(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))

    fit({}, Lazy())


def test_lazy_modules_that_were_never_run(run_distributed: WorkerPool) -> None:
    check(run_distributed, [(lazy, (), r"lazy module.*UninitializedParameter")])
