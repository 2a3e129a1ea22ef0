"""What LightningModules and Trainers do around their steps, on every kind of axis: the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from tests.bad_input.common import check
from tests.resume.common import logged
from tests.strategies.common import Block, Notes, Tower, loader, make_trainer, weights
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
SECONDS = 280.0


class Four(Tower):
    """Blocks enough for two stages of two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])


class NumberOfSteps(Four):
    """A schedule that wants to know the number of steps, which has Lightning prepare the data early."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}]


class OwnClipping(Four):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class OwnStep(Four):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


class Plateau(Four):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class OwnSchedule(Four):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class SeveralLoaders(Four):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("v", F.mse_loss(self(batch[0]), batch[1]), add_dataloader_idx=True)


class BatchOfTwo(Four):
    """One batch of each loader in a dict."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, targets = (torch.cat([part[i] for part in batch.values()]) for i in (0, 1))
        loss = F.mse_loss(self(rows), targets)
        self.log("train_loss", loss)
        return loss


class Freezing(Four):
    def on_train_start(self) -> None:
        self.blocks[1].requires_grad_(False)


class Skipping(Four):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class Returning(Four):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "extra": torch.ones(3)}


class Norms(Four):
    """Lightning's own way to watch gradients."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class TwoOptimizers(Four):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        optimizers: Any = self.optimizers()  # one, or a list: Lightning declares both
        first, second = optimizers
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(first, 0.1)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.05), torch.optim.Adam(self.out.parameters(), eps=1e-3)


class Collecting(Four):
    """Lists and dicts of lists that steps add to and hooks empty, as Lightning's migration guide has it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Any]] = {"loss": [], "rows": []}
        self.outputs: list[Any] = []
        self.flat: list[float] = []
        self.last = -1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1])
        self.kept["loss"].append(loss)
        self.kept["rows"].append(len(out))
        self.last = batch_idx
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.kept["loss"]).mean())
        self.log_dict({"rows": float(sum(self.kept["rows"])), "batches": float(len(self.kept["rows"]))})
        self.log("last", float(self.last))
        for values in self.kept.values():
            values.clear()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self(batch[0])
        self.flat.extend(out.tolist())
        self.outputs.append({"out": out, "target": batch[1], "loss": F.mse_loss(out, batch[1])})

    def on_validation_epoch_end(self) -> None:
        out, target = (torch.cat([part[key] for part in self.outputs]) for key in ("out", "target"))
        self.log("error", (out - target).abs().max())
        self.log("val_mean", torch.stack([part["loss"] for part in self.outputs]).mean())
        self.log("flat", float(len(self.flat)))
        self.log("flat_sum", sum(self.flat))
        self.outputs.clear()
        self.flat = []


@dataclass
class Case:
    module: Callable[[], L.LightningModule]
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[L.Callback]] = list
    train: Callable[[int], Any] = lambda rows: loader(48, rows)
    valid: Callable[[int], Any] = lambda rows: loader(16, rows, seed=1)
    not_on: tuple[str, ...] = ()
    """Layouts on which it is not what one process does; each is tested or refused elsewhere."""


def _pair(rows: int) -> Any:
    return CombinedLoader({"a": loader(48, rows // 2), "b": loader(24, rows // 2, seed=3)}, "max_size_cycle")


def _many() -> list[L.Callback]:
    seen = LambdaCallback(on_train_start=lambda *_: None)
    return [LearningRateMonitor(), ModelSummary(2), Timer(), EarlyStopping("val_loss", patience=5), seen]


CASES: dict[str, Case] = {
    "number of steps": Case(NumberOfSteps),
    "number of steps, accumulated": Case(NumberOfSteps, {"accumulate_grad_batches": 2}),
    "own clipping": Case(OwnClipping),
    "own step": Case(OwnStep),
    "plateau": Case(Plateau),
    "own schedule": Case(OwnSchedule),
    "several loaders": Case(SeveralLoaders, valid=lambda rows: [loader(16, rows, seed=1), loader(8, rows, seed=2)]),
    "a dict of loaders": Case(BatchOfTwo, train=_pair),
    "freezing": Case(Freezing),
    "skipping": Case(Skipping),
    "returning": Case(Returning),
    "norms": Case(Norms, not_on=("pipeline",)),
    "two optimizers": Case(TwoOptimizers, not_on=("pipeline", "tensor")),
    "collecting": Case(Collecting, not_on=("shard",)),  # each rank has its own lists, as with Lightning's ddp
    "anomalies": Case(Four, {"detect_anomaly": True}),
    "clipped values": Case(Four, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "overfitting": Case(Four, {"overfit_batches": 2}),
    "a dry run": Case(Four, {"fast_dev_run": 2}),
    "limits": Case(Four, {"limit_train_batches": 0.5, "limit_val_batches": 1}),
    "reloading": Case(Four, {"reload_dataloaders_every_n_epochs": 1}),
    "scheduled windows": Case(Four, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]),
    "callbacks": Case(Four, {"log_every_n_steps": 1, "enable_model_summary": True}, callbacks=_many),
}
LAYOUTS = {
    "shard": {"data_parallel_shard_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
Seen = tuple[list[dict[str, float]], dict[str, float], dict[str, Tensor]]


def run(name: str, layout: str | None, folder: str) -> Seen:
    torch.manual_seed(0)
    case, notes = CASES[name], Notes()
    module = case.module()
    rows = 8 if layout == "shard" else 16
    trainer = make_trainer(
        None if layout is None else LAYOUTS[layout],
        1 if layout is None else 2,
        **{"max_epochs": 2, "logger": CSVLogger(folder), **case.options, "callbacks": [notes, *case.callbacks()]},
    )
    trainer.fit(module, case.train(rows), case.valid(rows))
    return notes.metrics, {name: float(value) for name, value in trainer.callback_metrics.items()}, weights(module)


def run_all(layout: str | None, folder: str) -> dict[str, Seen]:
    return {name: run(name, layout, folder) for name, case in CASES.items() if layout not in case.not_on}


@pytest.fixture(scope="module")
def one_process(run_single: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return run_single(run_all, None, str(tmp_path_factory.mktemp("one")), timeout=SECONDS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(run_distributed: WorkerPool, one_process: dict[str, Seen], tmp_path: Any, layout: str) -> None:
    found = []
    for rank, seen in enumerate(run_distributed(run_all, layout, str(tmp_path), world_size=2, timeout=SECONDS)):
        for name, (metrics, at_end, final) in seen.items():
            wanted = one_process[name]
            pairs = [*zip(metrics, wanted[0], strict=True), (at_end, wanted[1])]
            found += [
                f"{name}, {rank}: {ours} != {theirs}"
                for ours, theirs in pairs
                if ours != pytest.approx(theirs, rel=2e-5, abs=1e-6)
            ]
            held = {key: value for key, value in final.items() if not value.isnan().all()}
            assert len(held) > len(final) // 3, (name, rank)
            far = [
                key for key, value in held.items() if not torch.allclose(value, wanted[2][key], rtol=1e-4, atol=2e-6)
            ]
            found += [f"{name}, {rank}: weights {far[:3]}"] if far else []
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])


def log_norms() -> tuple[dict[str, float], list[str]]:
    module = Norms()
    trainer = make_trainer(LAYOUTS["pipeline"], 2, max_epochs=2)
    with logged() as lines:
        trainer.fit(module, loader(32, 16))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, lines


def test_values_of_one_stage_are_told(run_distributed: WorkerPool) -> None:
    (first, lines), (second, _) = run_distributed(log_norms, world_size=2)
    assert len([line for line in lines if "logged on some stages of the pipeline only" in line]) == 1
    assert any("blocks.0" in name for name in first) and not any("blocks.0" in name for name in second)


def prune(layout: str) -> None:
    module = Four()
    pruning = ModelPruning("l1_unstructured", amount=0.5, parameters_to_prune=[(module.out, "weight")])
    make_trainer(LAYOUTS[layout], 2, callbacks=[pruning]).fit(module, loader(16, 8))


def test_pruning_of_parts_is_refused(run_distributed: WorkerPool) -> None:
    check(run_distributed, [(prune, (layout,), "Got: ModelPruning") for layout in LAYOUTS])
