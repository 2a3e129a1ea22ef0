"""The same training in several ways: by hand in torch, by Lightning's strategies, and by ours.

All ways share the model, its first weights, the samples of every global batch, the loss and AdamW. They stop at the
start line between two steps, where Lightning calls ``on_train_batch_start``. A step is what lies between two stops:
forward, backward, optimizer, logging and the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.support.gpt import BenchmarkGPT, RandomRows, planned_state_bytes, quiet
from benchmarks.support.state import LiveState, live_state
from benchmarks.support.traffic import Collective, CollectiveRecorder, Traffic, planned
from examples.gpt.gpt_module import GPT
from lightning_pardist import HybridStrategy

RECORDED_STEP = 2
"""Step whose collectives are counted: DistributedDataParallel settles on its buckets at the start of step 1."""


@dataclass(frozen=True)
class Size:
    """Shape of the model and of a rank's batch."""

    width: int = 384
    depth: int = 6
    heads: int = 6
    context: int = 128
    rows: int = 4
    """Chunks per rank and step."""
    steps: int = 40


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    layout: str
    """``ddp``, ``zero2``, ``fsdp`` or ``hybrid`` (two copies)."""
    by: str
    """``torch``, ``lightning ddp``, ``model parallel`` or ``ours``."""

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.layout}, {self.by}"


@dataclass
class Found:
    """What one variant left behind on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    state: LiveState | None = None
    planned: Traffic | None = None
    """Only ours: the plan's traffic."""
    planned_state: int | None = None
    """Only ours: bytes of parameters, gradients and Adam's moments on the rank that holds most."""


class StartLine:
    """Called between two steps: hands over to the other variants, and records one step's collectives."""

    def __init__(self, pause: Callable[[], None], found: Found) -> None:
        self._pause = pause
        self._found = found
        self._recorder = CollectiveRecorder()
        self._calls = 0

    def __call__(self) -> None:
        if self._calls == RECORDED_STEP + 1:
            self._recorder.__exit__(None, None, None)
            self._found.collectives = self._recorder.collectives
        self._pause()
        if self._calls == RECORDED_STEP:
            self._recorder.__enter__()
        self._calls += 1

    def after_step(self, loss: Tensor, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Notes what must be equal between variants, and the state that is alive."""
        self._found.losses.append(loss.detach())
        if self._found.state is None:
            self._found.state = live_state(module, optimizers)


class HandShardedGPT(BenchmarkGPT):
    """The module as ModelParallelStrategy wants it: its own configure_model shards it."""

    layout = "fsdp"

    def configure_model(self) -> None:
        mesh = hand_mesh(self.layout) if self.layout == "hybrid" else self.device_mesh["data_parallel"]
        shard_by_hand(self, mesh, self.layout)


def shard_by_hand(model: GPT, mesh: DeviceMesh, layout: str) -> None:
    """Shards as a careful user of fully_shard would, with the settings of our plan for the layout."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=layout != "zero2")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def hand_mesh(layout: str) -> DeviceMesh:
    """Returns the mesh of a layout: two copies for ``hybrid``, one otherwise."""
    if layout == "hybrid":
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def build(size: Size, kind: type[BenchmarkGPT] = BenchmarkGPT) -> BenchmarkGPT:
    """Returns the model with the weights that every variant starts from."""
    torch.manual_seed(0)
    return kind(width=size.width, depth=size.depth, heads=size.heads, context=size.context)


def _loader(size: Size) -> DataLoader[Tensor]:
    dataset = RandomRows(size.rows * dist.get_world_size() * size.steps, size.context)
    return DataLoader(dataset, size.rows, sampler=DistributedSampler(dataset, shuffle=False))


def train(variant: Variant, size: Size, found: Found, pause: Callable[[], None]) -> None:
    """Trains ``size.steps`` steps, stopping at ``pause`` before each."""
    line = StartLine(pause, found)
    if variant.by == "torch":
        _train_by_hand(variant.layout, size, line)
    else:
        _train_by_lightning(variant, size, found, line)


def _train_by_hand(layout: str, size: Size, line: StartLine) -> None:
    model = build(size)
    root: nn.Module = model
    if layout == "ddp":
        root = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        shard_by_hand(model, hand_mesh(layout), layout)
    optimizer = model.configure_optimizers()
    for batch in _loader(size):
        line()
        logits = root(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        line.after_step(loss, model, [optimizer])


class _AtStartLine(L.Callback):
    def __init__(self, line: StartLine, found: Found) -> None:
        self._line = line
        self._found = found

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, HybridStrategy):
            model = strategy.parallel_model
            assert model is not None and strategy.meshes is not None
            self._found.planned = planned(model.plan, strategy.meshes)
            self._found.planned_state = planned_state_bytes(model)

    def on_train_batch_start(self, *args: Any) -> None:
        self._line()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self._line.after_step(outputs["loss"], module, trainer.optimizers)


def _train_by_lightning(variant: Variant, size: Size, found: Found, line: StartLine) -> None:
    kind = BenchmarkGPT
    if variant.by == "model parallel":
        kind = type("HandShardedGPT", (HandShardedGPT,), {"layout": variant.layout})
    trainer = L.Trainer(
        strategy=_strategy(variant),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=size.steps,
        use_distributed_sampler=False,  # the loader has one, the same for every variant
        callbacks=[_AtStartLine(line, found)],
        **quiet(),
    )
    trainer.fit(build(size, kind), _loader(size))


def _strategy(variant: Variant) -> str | Strategy:
    if variant.by == "lightning ddp":
        return "ddp"
    if variant.by == "model parallel":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    zero_stage = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "hybrid": 3}[variant.layout]
    copies = {"ddp": "auto", "hybrid": 2}.get(variant.layout, 1)
    return HybridStrategy(data_parallel_replicate_size=copies, zero_stage=zero_stage, print_plan=False)
