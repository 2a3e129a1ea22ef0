"""Trains one of the modules of ``tests.support.modules`` and notes everything that must not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from lightning_pardist import whole_tensor
from lightning_pardist.torch_dtensor_api import local_tensor
from tests.support.modules import MODULES, TRAIN_ROWS, VALID_ROWS

GLOBAL_BATCH = 8
TOLERANCE = 1e-5
"""Relative to the largest number of a tensor. A gradient that is small because large parts cancel (of a bias before a
batch norm it is zero but for rounding) keeps the error of its parts: it is held against 1/10 of the largest one."""


@dataclass
class Record:
    """One run, as one rank saw it."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    """``trainer.callback_metrics`` after every training batch and every validation."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Whole, per optimizer step, before clipping; parameters that have none are left out."""
    clipped: list[dict[str, Tensor]] = field(default_factory=list)
    """The same as the optimizer used them."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""
    moved: float = 0.0
    """Largest change of a weight, as a check that something was trained."""
    rates: list[float] = field(default_factory=list)
    units: int = 0


class Recorder(L.Callback):
    """Fills a record while the Trainer runs."""

    def __init__(self) -> None:
        self.record = Record()
        self._start: dict[str, Tensor] = {}
        self._owned: dict[int, dict[str, nn.Parameter]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = state(pl_module)
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for optimizer in trainer.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._owned[id(optimizer)] = {names[id(p)]: p for p in held}
            optimizer.register_step_post_hook(
                lambda optimizer, args, kwargs: self.record.clipped.append(self._gradients(optimizer))
            )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.record.gradients.append(self._gradients(optimizer))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._note(trainer)
        self.record.rates += [group["lr"] for o in trainer.optimizers for group in o.param_groups]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer)
        self.record.weights = state(pl_module)
        self.record.moved = max(
            float((value - self._start[name]).abs().max())
            for name, value in self.record.weights.items()
            if value.is_floating_point() and value.numel()
        )

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """By name, of the parameters that were given to it.

        While it updates it may have shards in their place; inside a manual step the module shows whole copies.
        """
        return all_whole({name: p.grad for name, p in self._owned[id(optimizer)].items() if p.grad is not None})

    def _note(self, trainer: L.Trainer) -> None:
        self.record.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def whole(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor.detach()).clone()


def all_whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for many: plain shards in one exchange, for eight processes on two cores wait long for each."""
    found: dict[str, Tensor] = {}
    together: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        shards = [i for i, p in enumerate(getattr(tensor, "placements", ())) if type(p) is Shard]
        others = [p for p in getattr(tensor, "placements", ()) if type(p) is not Shard]
        if len(shards) == 1 and all(p.is_replicate() for p in others):
            assert isinstance(tensor, DTensor)
            together.setdefault((tensor.device_mesh, shards[0], tensor.dtype), []).append(name)
        else:
            found[name] = whole(tensor)
    for (mesh, axis, _), names in together.items():
        found |= _gathered({name: tensors[name] for name in names}, axis, mesh.get_group(axis))
    return {name: found[name] for name in tensors}


def _gathered(tensors: Mapping[str, Tensor], axis: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Of shards along one mesh axis, in chunks as torch cuts them."""
    size = dist.get_world_size(group)
    shapes: dict[str, list[list[int]]] = {}
    dims: dict[str, int] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        placement = tensor.placements[axis]
        assert isinstance(placement, Shard)
        dim = dims[name] = placement.dim
        chunk, shapes[name] = -(-tensor.shape[dim] // size), []
        for rank in range(size):
            shape = list(tensor.shape)
            shape[dim] = max(0, min(chunk, tensor.shape[dim] - rank * chunk))
            shapes[name].append(shape)
    longest = max(sum(math.prod(shapes[name][rank]) for name in tensors) for rank in range(size))
    flat = torch.cat([local_tensor(tensor.detach()).reshape(-1) for tensor in tensors.values()])
    parts = [flat.new_empty(longest) for _ in range(size)]
    dist.all_gather(parts, torch.cat([flat, flat.new_zeros(longest - flat.numel())]), group=group)
    pieces = [
        part[: sum(math.prod(shapes[n][rank]) for n in tensors)].split([math.prod(shapes[n][rank]) for n in tensors])
        for rank, part in enumerate(parts)
    ]
    return {
        name: torch.cat([pieces[rank][i].view(shapes[name][rank]) for rank in range(size)], dims[name])
        for i, name in enumerate(tensors)
    }


def state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, metrics' own states left out."""
    return all_whole(module.state_dict())


def train(name: str, strategy: str | Strategy, options: dict[str, Any], nodes: int = 1) -> Record:
    """Two epochs of three steps, a validation after each."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # other ranks start from other weights: rank 0's must win
    make: Callable[[], Any] = MODULES[name]
    module = make()
    recorder = Recorder()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size // nodes,
        num_nodes=nodes,
        max_epochs=2,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        **options,
    )
    rows = GLOBAL_BATCH // world_size
    training = DataLoader(module.dataset(TRAIN_ROWS, seed=5), batch_size=rows)
    validation = DataLoader(module.dataset(VALID_ROWS, seed=7), batch_size=rows)
    has_validation = type(module).validation_step is not L.LightningModule.validation_step
    trainer.fit(module, training, validation if has_validation else None)
    plan = getattr(trainer.strategy, "plan", None)
    recorder.record.units = len(plan.data_parallel.units) if plan is not None else 0
    return recorder.record


def train_all(cases: Sequence[tuple[str, str, dict[str, Any]]], nodes: int = 1) -> list[Record]:
    """Several runs in one call, for the start of a Trainer costs little and the start of a call does not."""
    return [train(*case, nodes=nodes) for case in cases]


def differences(got: Record, want: Record, tolerance: float = TOLERANCE, *, partial: bool = False) -> list[str]:
    """Returns, in words, everything in which two runs differ by more than ``tolerance``.

    Args:
        got: the run in question.
        want: the one in one process.
        tolerance: relative to the largest number of a tensor.
        partial: ``got`` holds a part of the module, as a pipeline stage does: what it holds is compared.
    """
    if partial:
        got, want = _held(got, want)
    found = []
    if len(got.metrics) != len(want.metrics):
        found.append(f"{len(got.metrics)} notes of metrics, not {len(want.metrics)}")
    for moment, (ours, theirs) in enumerate(zip(got.metrics, want.metrics, strict=False)):
        if ours.keys() != theirs.keys():
            found.append(f"metrics at {moment}: {sorted(ours)}, not {sorted(theirs)}")
        for name in ours.keys() & theirs.keys():
            if not abs(ours[name] - theirs[name]) <= tolerance * abs(theirs[name]) + 1e-7:
                found.append(f"metric {name} at {moment}: {ours[name]:.8g}, not {theirs[name]:.8g}")
    for label in ("gradients", "clipped"):
        ours, theirs = getattr(got, label), getattr(want, label)
        if len(ours) != len(theirs):
            found.append(f"{len(ours)} optimizer steps with {label}, not {len(theirs)}")
        for step, (mine, reference) in enumerate(zip(ours, theirs, strict=False)):
            # Clipping by value makes numbers smaller, not their errors.
            scales = {name: _largest(value) for name, value in want.gradients[step].items()}
            floor = max(scales.values()) / 10
            scales = {name: max(value, floor) for name, value in scales.items()}
            found += [f"{label} at {step}, {t}" for t in _tensor_differences(mine, reference, tolerance, scales)]
            ours_norm, their_norm = _norm(mine), _norm(reference)
            if abs(ours_norm - their_norm) > tolerance * their_norm:
                found.append(f"norm of {label} at {step}: {ours_norm:.8g}, not {their_norm:.8g}")
    found += [f"weights, {text}" for text in _tensor_differences(got.weights, want.weights, tolerance)]
    if got.rates != want.rates:
        found.append(f"learning rates {got.rates}, not {want.rates}")
    if want.moved < 1e-3:
        found.append(f"nothing was trained: the largest change is {want.moved}")
    return found


def _held(got: Record, want: Record) -> tuple[Record, Record]:
    """Returns both runs with the tensors that the first one holds: those of other stages are NaN."""
    held = {name for name, value in got.weights.items() if not (value.is_floating_point() and value.isnan().all())}

    def part(record: Record) -> Record:
        return replace(
            record,
            gradients=[{n: g for n, g in step.items() if n in held} for step in record.gradients],
            clipped=[{n: g for n, g in step.items() if n in held} for step in record.clipped],
            weights={n: w for n, w in record.weights.items() if n in held},
        )

    assert held, "a stage without any weight"
    return part(got), part(want)


def _norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors.values()]).norm()) if tensors else 0.0


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _tensor_differences(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, scales: dict[str, float] | None = None
) -> list[str]:
    found = []
    if ours.keys() != theirs.keys():
        found.append(f"names {sorted(ours.keys() ^ theirs.keys())} are on one side only")
    for name in ours.keys() & theirs.keys():
        mine, reference = ours[name], theirs[name]
        if mine.dtype != reference.dtype or mine.shape != reference.shape:
            found.append(f"{name}: {mine.dtype} {tuple(mine.shape)}, not {reference.dtype} {tuple(reference.shape)}")
        elif reference.numel():
            error = float((mine.double() - reference.double()).abs().max())
            scale = scales[name] if scales else _largest(reference)
            if not error <= tolerance * scale + 1e-8:
                found.append(f"{name}: off by {error:.3g} where the largest is {scale:.3g}")
    return found
