"""Around the numbers of a step: checkpoints, evaluation, precision, random numbers, batches, refusals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy, TensorOptions, whole_tensor
from tests.support.pool import WorkerPool
from tests.tensor_parallel.models import MODELS, VOCABULARY, Trained, dataset
from tests.tensor_plan import models as parts


def trainer_of(options: dict[str, Any] | None, **given: Any) -> L.Trainer:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    strategy: Any = "auto" if options is None else HybridStrategy(print_plan=False, **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    return L.Trainer(
        accelerator="cpu", strategy=strategy, **{"devices": ranks, "enable_checkpointing": False, **quiet, **given}
    )


def batches(options: dict[str, Any] | None) -> DataLoader[Any]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return DataLoader(dataset(), batch_size=8 * (options or {}).get("tensor_parallel_size", 1) // ranks)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole_tensor(p.detach()).clone() for name, p in module.named_parameters()}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(name: str, options: dict[str, Any] | None, path: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module, trainer = MODELS[name](), trainer_of(options)
    trainer.fit(module, batches(options))
    trainer.save_checkpoint(path)
    return weights(module)


def resumed(name: str, options: dict[str, Any] | None, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(5)
    module, trainer = MODELS[name](), trainer_of(options, max_epochs=2)
    first: dict[str, Tensor] = {}

    class AtStart(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            first.update(weights(pl_module))

    trainer.callbacks.append(AtStart())  # type: ignore[attr-defined]
    trainer.fit(module, batches(options), ckpt_path=path)
    return first, weights(module)


@pytest.mark.timeout(300)
def test_checkpoints_go_to_other_layouts_and_back(run_distributed: WorkerPool, run_single: Any, tmp_path: Path) -> None:
    tensor, both = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "data_parallel_shard_size": 2}
    grouped = {"tensor_parallel_size": 4}  # key-value heads that two ranks hold
    path = str(tmp_path / "tensor")
    before = run_distributed(saved, "grouped fused", tensor, path, world_size=2)[0]
    ends = []
    for options, size in ((both, 4), (grouped, 4), ({"zero_stage": 3}, 2), (tensor, 2)):
        first, after = run_distributed(resumed, "grouped fused", options, path, world_size=size)[0]
        assert all(torch.equal(first[name], before[name]) for name in before), options
        ends.append(after)
    path = str(tmp_path / "both")
    before = run_distributed(saved, "grouped fused", both, path, world_size=4)[0]
    first, after = run_distributed(resumed, "grouped fused", {"zero_stage": 0}, path, world_size=2)[0]
    assert all(torch.equal(first[name], before[name]) for name in before)
    for other in (*ends, after):
        for name, value in ends[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


# ---- evaluation and precision ----------------------------------------------------------------------------------------


def evaluated(options: dict[str, Any] | None, precision: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    module = MODELS["fused split"]()
    trainer = trainer_of(options, precision=precision)
    before = trainer.validate(module, batches(options), verbose=False)[0]["val_loss"]
    trainer.fit(module, batches(options))
    after = trainer.validate(module, batches(options), verbose=False)[0]["val_loss"]
    predictions = trainer.predict(module, batches(options))
    assert predictions is not None
    return [before, after], predictions


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_evaluation_before_and_after_training(run_distributed: WorkerPool, run_single: Any, precision: Any) -> None:
    losses, predictions = run_single(evaluated, None, precision)
    for options in (
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "tensor": TensorOptions(loss_parallel=False)},
    ):
        for ours, predicted in run_distributed(evaluated, options, precision):
            torch.testing.assert_close(ours, losses, rtol=1e-5 if precision == "32-true" else 2e-2, atol=0.0)
            if precision == "32-true":
                torch.testing.assert_close(predicted, predictions, rtol=1e-5, atol=1e-5)
                assert all(type(logits) is Tensor for logits in predicted)  # no rank has to ask others for them


# ---- random numbers --------------------------------------------------------------------------------------------------


class Dropping(Trained):
    """Dropout on whole tensors, which must be one on all ranks, and inside a region, where it must differ."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 5)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = self.inside(self.up(batch[0]))
        self.kept.append((hidden == 0).detach())
        whole = self.outside(self.down(hidden))
        self.kept.append((whole == 0).detach())
        return self.head(whole).square().mean()


def dropped() -> list[Tensor]:
    torch.manual_seed(3 + dist.get_rank())  # nobody has seeded alike
    module, data = Dropping(), TensorDataset(torch.ones(8, 8))
    trainer_of({"tensor_parallel_size": 2}).fit(module, DataLoader(data, batch_size=8))
    return module.kept


def test_dropout_is_one_on_whole_tensors_and_another_on_each_share(run_distributed: WorkerPool) -> None:
    first, second = run_distributed(dropped)
    assert first[0].shape == second[0].shape == (8, 32)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def other_batches() -> None:
    torch.manual_seed(3)
    data = dataset(seed=dist.get_rank())
    trainer_of({"tensor_parallel_size": 2}).fit(MODELS["fused split"](), DataLoader(data, batch_size=8))


def test_peers_that_see_other_batches(run_distributed: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"(?s)must see the same batch.*ranks \[0, 1\].*data_parallel_rank_and_size"):
        run_distributed(other_batches)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Attention that divides the features of its queries by a number of heads it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(parts.WIDTH, parts.WIDTH) for _ in range(3))
        self.out = nn.Linear(parts.WIDTH, parts.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q = q * (q.shape[-1] // parts.HEADS)  # half the width of a head on two ranks
        q, k, v = (t.view(*x.shape[:2], -1, parts.HEAD_DIM).transpose(1, 2) for t in (q, k, v))
        y = parts.causal(q, k, v).transpose(1, 2)
        return self.out(y.reshape(*x.shape[:2], -1))


class Counts(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.net = parts.GPT([parts.Block(Counting(), parts.MLP()) for _ in range(2)])

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.scored(self.net(batch[0]), batch[1])


def trained(plan: dict[str, str] | None) -> None:
    options = {"tensor_parallel_size": 2, "tensor": TensorOptions(plan=plan)}
    trainer_of(options).fit(Counts(), batches(options))


def test_code_that_counts_on_whole_features_is_found_by_the_probe(run_distributed: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"(?s)same on shares.*net\.blocks\.0\.attention.*Change.*replicate"):
        run_distributed(trained, None)
    run_distributed(trained, {"net.blocks.*.attention.*": "replicate"})


class Nothing(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.only(batch[0].float()).softmax(-1).mean()


def nothing() -> None:
    options = {"tensor_parallel_size": 2}
    trainer_of(options).fit(Nothing(), DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=8))


def test_a_module_without_regions_is_told_what_to_do_instead(run_distributed: WorkerPool) -> None:
    with pytest.raises(ValueError, match=r"(?s)none was found.*pardist_fsdp"):
        run_distributed(nothing)


class Other(torch.optim.SGD):
    """A subclass may look at whole tensors."""


def with_optimizer(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = MODELS["grouped fused"]()

    def configure() -> Any:
        optimizer = (Other if kind == "other" else torch.optim.SGD)(module.parameters(), lr=0.1, momentum=0.9)
        if kind == "hooked":  # somebody may look at DTensors after the step: then the step updates DTensors
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    module.configure_optimizers = configure
    options = {"tensor_parallel_size": 2} if dist.is_initialized() else None
    trainer_of(options).fit(module, batches(options))
    return weights(module)


def test_optimizers(run_distributed: WorkerPool, run_single: Any) -> None:
    want = run_single(with_optimizer, "plain")
    for name, value in run_distributed(with_optimizer, "hooked")[0].items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"(?s)every element alone.*optimizer 0 is Other"):
        run_distributed(with_optimizer, "other")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"verify": "all"}, "verify must be one of probe, full, off"),
        ({"plan": "column"}, "plan must be a mapping"),
        ({"async_tensor_parallel": True}, "symmetric memory"),
        ({"sequence_parallel": "yes"}, "True or False"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){words}.*Got.*From.*Change"):
        TensorOptions(**given)


def test_combinations_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"(?s)run eagerly.*Got: compile.*Change"):
        HybridStrategy(tensor_parallel_size=2, compile=True)
    assert VOCABULARY % 2


def across_nodes() -> list[str]:
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Heard()
    logger = logging.getLogger("lightning_pardist")
    logger.addHandler(handler)
    try:
        options = {"tensor_parallel_size": 4}
        trainer_of(options, devices=2, num_nodes=2, limit_train_batches=1).fit(MODELS["tower"](), batches(options))
    finally:
        logger.removeHandler(handler)
    return heard


def test_an_axis_that_crosses_nodes_is_warned_of(run_distributed: WorkerPool) -> None:
    first, *others = run_distributed(across_nodes, world_size=4, num_nodes=2)
    assert any("tensor axis of 4 ranks does not divide the 2 ranks of a node" in line for line in first)
    assert not any("does not divide" in line for heard in others for line in heard)
