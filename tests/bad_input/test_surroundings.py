"""Precision, devices, data and predictions that do not fit: refused on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch.utils.data import DataLoader, IterableDataset

from lightning_pardist.strategies.hybrid import HybridStrategy
from lightning_pardist.strategies.presets import PRESETS
from tests.bad_input.common import check, errors_of, fit, four_parts, loader, trainer
from tests.support.modules import Regression
from tests.support.pool import WorkerPool

NAMES = list(PRESETS)


def cuda_mixed() -> MixedPrecision:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a GradScaler without a GPU says so
        return MixedPrecision("16-mixed", "cuda")


@pytest.mark.parametrize("strategy", [*NAMES, "instance"])
def test_16_mixed_as_plugin(strategy: str) -> None:
    """The form every string takes on a GPU: Lightning makes this plugin of ``precision="16-mixed"``."""
    made: Any = HybridStrategy() if strategy == "instance" else strategy
    with pytest.raises(Exception, match=r"(?s)16-mixed.*bf16-mixed") as caught:
        L.Trainer(accelerator="cpu", devices=1, strategy=made, plugins=[cuda_mixed()], logger=False)
    four_parts(str(caught.value))


def test_16_mixed_as_argument_of_the_strategy() -> None:
    with pytest.raises(Exception, match=r"(?s)16-mixed.*bf16-mixed") as caught:
        HybridStrategy(precision_plugin=cuda_mixed())
    four_parts(str(caught.value))


@pytest.mark.parametrize("strategy", ["pardist_fsdp", "instance"])
def test_16_mixed_as_string(strategy: str) -> None:
    """On the CPU Lightning itself turns the string into bf16-mixed, with a warning; elsewhere it must be refused."""
    made: Any = HybridStrategy() if strategy == "instance" else strategy
    with pytest.warns(UserWarning, match="bf16-mixed"):
        used = L.Trainer(accelerator="cpu", devices=1, strategy=made, precision="16-mixed", logger=False)
    assert used.precision == "bf16-mixed"


@pytest.mark.gpu
# Without a GPU Lightning makes bf16-mixed of the string, see the test above: there is nothing to refuse.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Lightning takes 16-mixed as such on a CUDA device only")
@pytest.mark.parametrize("strategy", ["pardist_fsdp", "instance"])
def test_16_mixed_as_string_on_a_gpu(strategy: str) -> None:
    made: Any = HybridStrategy() if strategy == "instance" else strategy
    with pytest.raises(Exception, match=r"(?s)16-mixed.*bf16-mixed"):
        L.Trainer(accelerator="gpu", devices=1, strategy=made, precision="16-mixed", logger=False)


def test_a_plugin_of_unknown_effect() -> None:
    class Own(HalfPrecision):
        pass

    with pytest.raises(Exception, match="Got: Own") as caught:
        HybridStrategy(precision_plugin=Own("bf16-true"))
    four_parts(str(caught.value))


def fit_16_mixed(strategy: Any) -> None:
    fit(strategy, plugins=[cuda_mixed()])


def test_16_mixed_on_every_rank(run_distributed: WorkerPool) -> None:
    results = run_distributed(errors_of, [(fit_16_mixed, ("pardist_fsdp",)), (fit_16_mixed, ({"zero_stage": 0},))])
    for raised in zip(*results, strict=True):
        assert len({str(error) for error in raised}) == 1
        assert "16-mixed" in four_parts(str(raised[0]))


def ask_for_a_gpu(strategy: Any) -> None:
    fit(strategy, accelerator="gpu")


# The error is Lightning's, for a machine on which it finds no GPU.
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so asking for one is no mistake")
def test_no_gpu(run_distributed: WorkerPool) -> None:
    """Lightning's own check comes first and says what is missing; it must not be lost, nor come after a wait."""
    results = run_distributed(errors_of, [(ask_for_a_gpu, ("pardist_fsdp",)), (ask_for_a_gpu, ({},))])
    for raised in zip(*results, strict=True):
        assert len({str(error) for error in raised}) == 1
        assert "gpu" in str(raised[0]).lower() or "cuda" in str(raised[0]).lower()


class ByRank(IterableDataset[Any]):
    """One batch more on every further rank."""

    def __init__(self, rows: int, known: bool, more: int = 2) -> None:
        self.rows = rows + more * (dist.get_rank() if dist.is_initialized() else 0)
        if known:
            self.__class__ = SizedByRank

    def __iter__(self) -> Any:
        return iter(Regression.dataset(self.rows, seed=3))


class SizedByRank(ByRank):
    def __len__(self) -> int:
        return self.rows


class Predicting(Regression):
    """Predictions in a shape of the test's choice."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        if self.what == "mean":
            return out.mean()
        if self.what == "transposed":
            return torch.stack([out, out, out])
        if self.what == "string":
            return "some text"
        if self.what == "one_rank":
            return out.mean() if dist.get_rank() == 1 else out
        return out


def evaluate_uneven(strategy: dict[str, Any], known: bool, entry: str) -> None:
    module = Predicting("rows")
    data = DataLoader(ByRank(4, known), batch_size=2)
    options = {"use_distributed_sampler": False}
    if entry == "fit":
        trainer(strategy, max_epochs=1, max_steps=-1, **options).fit(module, loader(module), data)
    else:
        getattr(trainer(strategy, **options), entry)(module, data, verbose=False)


@pytest.mark.parametrize("known", [True, False], ids=["sized", "iterable"])
def test_uneven_evaluation(run_distributed: WorkerPool, known: bool) -> None:
    cases: list[Any] = [
        (evaluate_uneven, ({"zero_stage": stage}, known, entry), "equally many batches")
        for stage in (1, 3)
        for entry in ("validate", "test", "fit")
    ]
    check(run_distributed, cases)


def train_uneven(known: bool) -> tuple[int, float]:
    torch.manual_seed(0)
    module = Regression()
    used = trainer({}, max_epochs=2, max_steps=-1, use_distributed_sampler=False)
    used.fit(module, DataLoader(ByRank(4, known), batch_size=2))
    total = sum(p.full_tensor().double().sum() for p in module.parameters())
    return used.global_step, float(total)


@pytest.mark.parametrize("known", [True, False], ids=["sized", "iterable"])
def test_uneven_training_ends_with_the_shortest(run_distributed: WorkerPool, known: bool) -> None:
    first, second = run_distributed(train_uneven, known)
    assert first == second
    assert first[0] == 4  # two epochs of the two batches that both ranks have


def gather(what: str) -> None:
    module = Predicting(what)
    trainer({"gather_predictions": True}).predict(module, loader(module))


def gather_iterable() -> None:
    module = Predicting("rows")
    trainer({"gather_predictions": True}).predict(module, DataLoader(ByRank(4, False, more=0), batch_size=2))


def test_predictions_that_cannot_be_gathered(run_distributed: WorkerPool) -> None:
    cases: list[Any] = [
        (gather, ("mean",), r"one entry per sample.*\(\) for a batch of 2"),
        (gather, ("transposed",), r"\(3, 2\) for a batch of 2"),
        (gather, ("string",), r"str for a batch of 2"),
        (gather, ("one_rank",), r"rank 1"),
        (gather_iterable, (), r"sample indices"),
    ]
    check(run_distributed, cases)


def predict_too_few(stage: int) -> None:
    module = Predicting("rows")
    trainer({"zero_stage": stage}).predict(module, loader(module, rows=1))


def empty_on_one_rank(stage: int, entry: str) -> None:
    module = Predicting("rows")
    data = DataLoader(Regression.dataset(4 if dist.get_rank() else 0, seed=3), batch_size=2)
    options = {"use_distributed_sampler": False}
    if entry == "fit":
        trainer({"zero_stage": stage}, **options).fit(module, data)
    else:
        trainer({"zero_stage": stage}, **options).test(module, data, verbose=False)


def test_ranks_without_a_batch(run_distributed: WorkerPool) -> None:
    cases: list[Any] = []
    for stage in (0, 3):
        cases.append((predict_too_few, (stage,), r"at least one batch.*1 sample.*2 data ranks"))
        cases += [(empty_on_one_rank, (stage, entry), r"at least one batch.*\[0, 2\]") for entry in ("fit", "test")]
    check(run_distributed, cases)
