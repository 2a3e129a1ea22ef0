"""Real steps of the headline module on a layout: what every rank holds, keeps, sends and gathers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from benchmarks.support.traffic import CollectiveRecorder, Total, Traffic, axis_ranks, totals
from lightning_pardist import HybridStrategy
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.stage_program import StageProgram
from lightning_pardist.specs.estimate import AxisTraffic
from lightning_pardist.torch_dist_api import fsdp_parameters, whole_parameter
from lightning_pardist.torch_dtensor_api import local_tensor
from lightning_pardist.torch_pipelining_api import UserStage
from tests.composition.headline import Headline, Texts

ROWS = 8
"""Of a rank's batch."""
Case = tuple[dict[str, Any], Any]
"""Options of the strategy, and the precision."""


@dataclass
class Seen:
    """What one rank saw in one step."""

    state: tuple[int, int, int]
    """Bytes of parameters, gradients and optimizer state."""
    activations: int
    gathered: int
    """Bytes of whole parameters in the middle of the step."""
    traffic: Traffic
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Axis -> the ranks that meet this one."""


class _Kept:
    """What autograd keeps; gone when it lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Meter:
    """Bytes that backward passes still need, at the worst moment."""

    stages: ClassVar[list[UserStage]] = []
    """Of this rank."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.sent: list[weakref.ref[Tensor]] = []
        self.most = self.gathered = 0

    def keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._alive.add(kept)
        return kept

    def give(self, kept: _Kept) -> Tensor:
        """Every backward pass begins here, when everything that was kept is still there."""
        sent = (tensor for reference in self.sent if (tensor := reference()) is not None)
        found = {s.data_ptr(): s.nbytes() for s in map(_storage, [*sent, *(k.tensor for k in self._alive)])}
        whole = {s.data_ptr(): s.nbytes() for s in map(_storage, self._parameters())}
        self.gathered = max(self.gathered, sum(whole.values()))
        elsewhere = {s.data_ptr() for s in map(_storage, [*self._module.buffers(), *self._received()])}
        self.most = max(self.most, sum(n for p, n in found.items() if p not in whole and p not in elsewhere))
        return kept.tensor

    def _parameters(self) -> Iterator[Tensor]:
        if _model(self._module.trainer).kind != "shard":
            yield from self._module.parameters()
            return
        for record in fsdp_parameters(self._module):
            whole = whole_parameter(record)
            if whole is not None:
                yield whole

    def _received(self) -> Iterator[Tensor]:
        for stage in self.stages:
            for infos in stage.args_recv_info.values():
                yield from (info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.detach().untyped_storage()


class Measured(Headline):
    """Watched from outside; the fake runs before its steps are not."""

    meter: ClassVar[Meter | None] = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if Measured.meter is None:
            return super().training_step(batch, batch_idx)
        with saved_tensors_hooks(Measured.meter.keep, Measured.meter.give):
            return super().training_step(batch, batch_idx)


class _Watch(L.Callback):
    """Watches the last of three steps: the first ones do what is done once."""

    def __init__(self) -> None:
        self.traffic: Traffic = {}
        self.state = (0, 0, 0)
        self._recorder = CollectiveRecorder()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 2:
            Measured.meter = Meter(module)
            self._recorder.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if args[-1] == 2:
            self._recorder.__exit__(None, None, None)
            self.state = _stored(module, trainer)
            self.traffic = {
                **totals(self._recorder.collectives, "data"),
                **totals(self._recorder.collectives, "stages"),
            }


def _stored(module: L.LightningModule, trainer: L.Trainer) -> tuple[int, int, int]:
    absent = _model(trainer).absent
    parameters = [p for name, p in module.named_parameters() if name not in absent]
    moments = [s[key] for o in trainer.optimizers for s in o.state.values() for key in ("exp_avg", "exp_avg_sq")]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return _nbytes([p.detach() for p in parameters]), _nbytes(gradients), _nbytes(moments)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def _model(trainer: L.Trainer) -> ParallelModel:
    strategy = trainer.strategy
    assert isinstance(strategy, HybridStrategy) and strategy.parallel_model is not None
    return strategy.parallel_model


def step_of(case: Case) -> Seen:
    """Trains three steps and returns what the last one took."""
    layout, precision = case
    torch.manual_seed(0)
    sizes = [layout.get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor")]
    rows = 3 * ROWS * dist.get_world_size() // (sizes[0] * sizes[1])
    strategy, watch, module = HybridStrategy(print_plan=False, **layout), _Watch(), Measured()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), precision=precision, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[watch], num_sanity_val_steps=0,
    )  # fmt: skip
    plain = StageProgram.forward

    def forward(program: StageProgram, *received: Tensor, micro: int) -> Any:
        out = plain(program, *received, micro=micro)
        if Measured.meter is not None and isinstance(out, tuple):
            Measured.meter.sent += [weakref.ref(tensor) for tensor in out]
        return out

    Meter.stages.clear()
    make = UserStage.__init__

    def remembered(stage: UserStage, *args: Any, **kwargs: Any) -> None:
        make(stage, *args, **kwargs)
        Meter.stages.append(stage)

    try:
        with patch.object(StageProgram, "forward", forward), patch.object(UserStage, "__init__", remembered):
            trainer.fit(module, DataLoader(Texts(rows, 5), batch_size=ROWS))
        assert Measured.meter is not None and strategy.meshes is not None
        names = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "data_parallel")
        return Seen(
            state=watch.state,
            activations=Measured.meter.most,
            gathered=Measured.meter.gathered,
            traffic=watch.traffic,
            groups={name: axis_ranks(strategy.meshes, name) for name in (*names, "tensor_parallel")},
        )
    finally:
        Measured.meter = None


def steps_of(cases: list[Case]) -> list[Seen]:
    return [step_of(case) for case in cases]


def foretold(traffic: tuple[AxisTraffic, ...], groups: dict[str, tuple[int, ...]]) -> Traffic:
    """Returns what ``Seen.traffic`` must be."""
    found: Traffic = {}
    for each in traffic:
        key = each.collective, groups[each.axis]
        before = found.get(key, Total(0, 0))
        found[key] = Total(before.count + each.count, before.nbytes + each.nbytes)
    return found
