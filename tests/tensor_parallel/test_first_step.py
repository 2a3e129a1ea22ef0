"""``verify="full"``: the whole first step is compared, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_pardist import HybridStrategy, TensorOptions, whole_tensor
from lightning_pardist.strategies import first_step
from tests.support.pool import WorkerPool
from tests.tensor_parallel.models import MODELS, Trained, dataset
from tests.tensor_plan import models as parts


class Stateful(Trained):
    """Everything that a step may change: metrics, buffers, counters, random numbers, dropout inside and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.GPT([parts.Block(parts.FusedAttention("split"), parts.MLP()) for _ in range(2)])
        self.before, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(parts.VOCABULARY)
        self.metric, self.seen = MeanMetric(), 0
        self.drawn: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen += 1
        logits = self.before(self.net(batch[0]))
        loss = self.scored(self.norm(logits.transpose(1, 2)).transpose(1, 2).contiguous(), batch[1])
        self.metric(loss.detach())
        self.log("mean", self.metric)
        self.drawn += [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return loss


class Softmaxed(Trained):
    """A layer before a softmax, which must not be sharded whatever a plan says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.GPT([parts.Block(parts.FusedAttention("split"), parts.MLP())], tied=False)
        self.gate, self.out = nn.Linear(parts.WIDTH, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        weights = self.out(self.gate(self.net.tokens(batch[0])).softmax(-1)).mean()
        return self.scored(self.net(batch[0]), batch[1]) * weights


def train(kind: str, verify: Any, plan: dict[str, str] | None = None, sequence: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    module = {**MODELS, "stateful": Stateful, "softmaxed": Softmaxed}[kind]()
    tensor = TensorOptions(verify=verify, plan=plan, sequence_parallel=sequence)
    strategy = HybridStrategy(tensor_parallel_size=2, tensor=tensor, print_plan=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_train_batches=2,
    )  # fmt: skip
    trainer.fit(module, DataLoader(dataset(), batch_size=8))
    assert strategy.plan is not None and strategy.plan.tensor is not None
    return {
        "notes": strategy.plan.tensor.notes,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": {name: whole_tensor(p.detach()).clone() for name, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
        "seen": getattr(module, "seen", None),
        "drawn": getattr(module, "drawn", None),
    }


@pytest.mark.timeout(300)
def test_the_first_step_is_compared_and_leaves_no_trace(run_distributed: WorkerPool) -> None:
    full, off = (run_distributed(train, "stateful", verify, world_size=2) for verify in ("full", "off"))
    for ours, untouched in zip(full, off, strict=True):
        assert "the first step was compared with the whole module's: differences up to" in ours["notes"][-1]
        assert (ours["seen"], ours["drawn"]) == (2, untouched["drawn"])
        assert ours["metrics"] == untouched["metrics"]
        for kind in ("weights", "buffers"):
            assert all(torch.equal(ours[kind][name], value) for name, value in untouched[kind].items())


@pytest.mark.hf
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_models_of_transformers_pass(run_distributed: WorkerPool, kind: str) -> None:
    found = run_distributed(train, kind, "full", None, True, world_size=2)
    assert "the first step was compared" in found[0]["notes"][-1]


def test_a_wrong_plan_is_found(run_distributed: WorkerPool) -> None:
    errors = run_distributed.errors(train, "softmaxed", "full", {"gate": "column", "out": "row"}, world_size=2)
    with pytest.raises(ValueError, match=r"(?s)first step must compute the same.*Got: .* is off by .*From: Softmaxed"):
        raise errors[0]
    assert {str(error) for error in errors} == {str(errors[0])}


def without_memory() -> None:
    before = first_step.free_bytes
    first_step.free_bytes = lambda device: 10_000
    try:
        train("gpt2", "full")
    finally:
        first_step.free_bytes = before


def test_a_step_that_does_not_fit_is_refused_with_the_figures(run_distributed: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"(?s)80% of .*weights [\d,]+, .*2 rank\(s\) .* 10,000 bytes free"):
        run_distributed(without_memory, world_size=2)
