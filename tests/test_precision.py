"""What each ``Trainer(precision=...)`` means under each strategy: the dtype at every place where one can differ.

The tables in docs/precision.md are these tests in words.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_pardist import HybridStrategy
from lightning_pardist.torch_dtensor_api import local_tensor

WIDTH, CLASSES, ROWS, STEPS = 8, 4, 8, 3


@dataclass
class Seen:
    """Dtypes as words, ``/`` between several; filled while a fit runs."""

    stored: set[str] = field(default_factory=set)
    batch: set[str] = field(default_factory=set)
    gathered: set[str] = field(default_factory=set)
    weight_in_block: set[str] = field(default_factory=set)
    block_output: set[str] = field(default_factory=set)
    loss: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)
    gradient: set[str] = field(default_factory=set)
    optimizer: set[str] = field(default_factory=set)
    metrics: set[str] = field(default_factory=set)

    def words(self) -> dict[str, str]:
        return {name: "/".join(sorted(found)) for name, found in vars(self).items()}


def word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: Seen | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.norm(x))
        if self.seen is not None and self.training:
            self.seen.weight_in_block.add(word(self.linear.weight))
            self.seen.block_output.add(word(hidden))
        return x + hidden.relu()


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.mean_loss = MeanMetric()
        self.losses: list[float] = []
        self.seen: Seen | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits, y)
        if self.seen is not None:
            self.seen.batch.add(word(x))
            self.seen.loss.add(word(loss))
        self.accuracy(logits, y)
        self.mean_loss(loss)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        self.log("mean_loss", self.mean_loss, on_epoch=True, on_step=False)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # Adam's eps is zero in fp16


class ConvNet(Classifier):
    """Batch norms, whose running statistics stay in fp32 while convolutions compute in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(  # type: ignore[assignment]
            nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, WIDTH),
        )  # fmt: skip


class Watch(L.Callback):
    """Looks at what only exists between hooks."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        reducer = getattr(getattr(trainer.strategy, "parallel_model", None), "reducer", None)
        if reducer is not None and trainer.global_step == 0:
            reducer.register_comm_hook(None, self._reduce)

    def _reduce(self, state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects, not as text
        self.seen.reduced.add(word(bucket.buffer()))
        return allreduce_hook(dist.group.WORLD, bucket)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.seen.gradient |= {word(p.grad) for p in module.parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        module.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seen.stored |= {word(p) for p in module.parameters()}
        for state in trainer.optimizers[0].state.values():
            self.seen.optimizer |= {word(value) for value in state.values() if isinstance(value, Tensor)}
        for metric in (module.accuracy, module.mean_loss):
            self.seen.metrics |= {word(value) for value in metric.metric_state.values()}


@contextlib.contextmanager
def watched_collectives(seen: Seen, trainer: L.Trainer) -> Iterator[None]:
    """Notes the dtype of what fully_shard gathers and reduces; DDP's reducer is not seen here."""

    def watch(name: str, found: set[str], only_between_copies: bool = False) -> None:
        original = getattr(dist, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs.get("output", kwargs.get("output_tensor"))
            if not only_between_copies or kwargs.get("group") is copies_group(trainer):
                found.add(word(tensor))
            return original(*args, **kwargs)

        stack.enter_context(mock.patch.object(dist, name, watched))

    with contextlib.ExitStack() as stack:
        # torch 2.13 renamed both.
        new = hasattr(dist, "reduce_scatter_single")
        watch("all_gather_single" if new else "all_gather_into_tensor", seen.gathered)
        watch("reduce_scatter_single" if new else "reduce_scatter_tensor", seen.reduced)
        watch("all_reduce", seen.reduced, only_between_copies=True)
        yield


def copies_group(trainer: L.Trainer) -> Any:
    """Returns the group over which hybrid sharding adds up its copies, or an object that is no group."""
    meshes = getattr(trainer.strategy, "meshes", None)
    if meshes is None or 1 in (meshes.sizes.data_parallel_replicate, meshes.sizes.data_parallel_shard):
        return object()
    return meshes.world["data_parallel_replicate"].get_group()


def fit(precision: str, layout: dict[str, Any] | None, model_class: type[Classifier] = Classifier) -> dict[str, Any]:
    """Returns what was seen in a fit of three steps, 8 rows each over all ranks; ``layout`` None: Lightning alone."""
    seen = Seen()
    torch.manual_seed(3)
    model = model_class()
    for module in (model, *model.blocks):
        module.seen = seen
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(ROWS * STEPS, WIDTH, generator=generator),
        torch.randint(0, CLASSES, (ROWS * STEPS,), generator=generator),
    )
    world = 1 if layout is None else dist.get_world_size()
    trainer = L.Trainer(
        strategy="auto" if layout is None else HybridStrategy(**layout, print_plan=False),
        precision=precision,  # type: ignore[arg-type]
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        callbacks=[Watch(seen)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with watched_collectives(seen, trainer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data, batch_size=ROWS // world))
    return {
        "seen": seen.words(),
        "losses": model.losses,
        "accuracy": float(trainer.callback_metrics["accuracy"]),
        "statistics": {word(b) for n, b in model.named_buffers() if "running" in n},
    }


def fit_all(precisions: list[str], layout: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {precision: fit(precision, layout) for precision in precisions}


PRECISIONS = ["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed"]
DDP = {"zero_stage": 0}
FSDP = {"zero_stage": 3, "data_parallel_replicate_size": 1}
HYBRID = {"zero_stage": 3, "data_parallel_replicate_size": 2}

METRICS = "float32/int64"


def expected(precision: str, *, sharded: bool) -> dict[str, str]:
    """Returns the row of the table."""
    if precision == "bf16-mixed":
        stored, low = "float32", "bfloat16"
    else:
        stored = low = {"32": "float32", "64": "float64", "bf16": "bfloat16", "16": "float16"}[precision.split("-")[0]]
    return {
        "stored": stored,
        "batch": stored,
        "gathered": low if sharded else "",
        "weight_in_block": low if sharded else stored,  # whole copies are cast by autocast at each operation
        "block_output": low,
        "loss": stored,
        "reduced": stored,
        "gradient": stored,
        "optimizer": stored,
        "metrics": METRICS,
    }


@pytest.fixture(scope="module")
def reference(run_single: Any) -> dict[str, dict[str, Any]]:
    """Lightning alone, in one process."""
    return run_single(fit_all, PRECISIONS, None)


@pytest.mark.parametrize(("layout", "world_size"), [(DDP, 2), (FSDP, 2), (HYBRID, 4)], ids=["ddp", "fsdp", "hybrid"])
def test_dtypes_and_losses(run_distributed: Any, reference: Any, layout: dict[str, Any], world_size: int) -> None:
    results = run_distributed(fit_all, PRECISIONS, layout, world_size=world_size)
    for precision in PRECISIONS:
        ours, alone = results[0][precision], reference[precision]
        assert ours["seen"] == expected(precision, sharded=layout is not DDP), precision
        # Rounding depends on how rows are cut, so low precision is only close.
        tolerance = {"32-true": 1e-5, "64-true": 1e-6}.get(precision, 0.03)
        assert ours["losses"] == pytest.approx(alone["losses"], rel=tolerance), precision
        assert all(result[precision]["losses"] == ours["losses"] for result in results)


def fit_convnet(layout: dict[str, Any] | None) -> dict[str, Any]:
    return fit("bf16-mixed", layout, ConvNet)


@pytest.mark.parametrize("layout", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_batch_norm_under_bf16_mixed(run_distributed: Any, run_single: Any, layout: dict[str, Any]) -> None:
    ours = run_distributed(fit_convnet, layout, world_size=2)[0]
    alone = run_single(fit_convnet, None)
    assert ours["statistics"] == {"float32"}
    assert ours["seen"]["stored"] == "float32"
    # Each rank normalises with its own rows here, so the first loss is near, not equal.
    assert ours["losses"][0] == pytest.approx(alone["losses"][0], rel=0.1)
    assert all(loss == loss for loss in ours["losses"])


class OneStep(L.Callback):
    """Notes shards before and after an optimizer step, and the gradient between."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.after: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.before = [local_tensor(p.detach()).clone() for p in module.parameters()]
        self.gradients = [local_tensor(p.grad).clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.after = [local_tensor(p.detach()).clone() for p in module.parameters()]


class SmallSteps(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-14)


def small_steps() -> tuple[bool, float]:
    torch.manual_seed(3)
    step = OneStep()
    trainer = L.Trainer(
        strategy=HybridStrategy(**FSDP, print_plan=False),
        precision="bf16-mixed",
        accelerator="cpu",
        devices=2,
        max_steps=1,
        callbacks=[step],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    trainer.fit(SmallSteps(), DataLoader(data, batch_size=4))
    exact = all(
        torch.equal(after, before - 2.0**-14 * gradient)
        for before, gradient, after in zip(step.before, step.gradients, step.after, strict=True)
    )
    moved = [(a != b).float().mean() for a, b in zip(step.after, step.before, strict=True) if a.numel()]
    return exact, float(torch.stack(moved).mean())


def test_master_weights_take_steps_that_bf16_would_swallow(run_distributed: Any) -> None:
    for exact, moved in run_distributed(small_steps, world_size=2):
        assert exact
        assert moved > 0.5


def refuse_instance() -> None:
    plugin = MixedPrecision("16-mixed", "cpu")
    L.Trainer(strategy=HybridStrategy(zero_stage=3), plugins=[plugin], accelerator="cpu", devices=2, logger=False)


def test_16_mixed_is_refused_as_an_instance(run_distributed: Any) -> None:
    errors = run_distributed.errors(refuse_instance, world_size=2)
    assert all(isinstance(error, MisconfigurationException) for error in errors)
    text = str(errors[0])
    assert "16-mixed" in text
    assert all(part in text for part in ("Got:", "From:", "Change: use precision='bf16-mixed'"))


def test_16_mixed_is_refused_by_name() -> None:
    # On the host Lightning itself turns the name into bf16-mixed; on a GPU it hands the strategy this plugin.
    trainer = L.Trainer(strategy="pardist_fsdp", precision="16-mixed", accelerator="cpu", devices=2, logger=False)
    assert trainer.precision == "bf16-mixed"
    with pytest.raises(MisconfigurationException, match=r"MixedPrecision \(16-mixed\)"):
        trainer.strategy.precision_plugin = MixedPrecision("16-mixed", "cuda")
