"""Trains one of the models and notes everything that must not depend on the layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pardist import HybridStrategy, whole_tensor
from tests.tensor_parallel import odd_models
from tests.tensor_parallel.models import MODELS, OTHERS, dataset

GLOBAL_BATCH = 8
TOLERANCE = 1e-5


class Notes(L.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.clipped: list[dict[str, Tensor]] = []
        self.weights: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        names = self.names = {id(p): name for name, p in pl_module.named_parameters()}
        optimizer = trainer.optimizers[0]

        def note(*_: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self.clipped.append({names[id(p)]: whole_tensor(p.grad).clone() for p in held if id(p) in names})

        if trainer.gradient_clip_val is None:
            optimizer.register_step_post_hook(note)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        # Inside a manual step the module shows shares; the optimizer holds what it always holds.
        held = [(self.names.get(id(p)), p) for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append({n: whole_tensor(p.grad).clone() for n, p in held if n and p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights = {n: whole_tensor(p.detach()).clone() for n, p in pl_module.named_parameters()}


def train(name: str, options: dict[str, Any] | None, trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Two steps of one model; ``options`` are the strategy's, None for one plain process."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(3 if options is None else 3 + dist.get_rank())  # rank 0's weights must win
    if options is not None and dist.get_rank() == 0:
        torch.manual_seed(3)
    module, notes = {**MODELS, **OTHERS, **odd_models.MODELS}[name](), Notes()
    strategy: Any = "auto" if options is None else HybridStrategy(print_plan=False, **options)
    data_ranks = ranks // (options or {}).get("tensor_parallel_size", 1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[notes],
        **{"gradient_clip_val": 0.5, **trainer_options},
    )
    trainer.fit(module, DataLoader(dataset(), batch_size=GLOBAL_BATCH // data_ranks))
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "metrics": notes.metrics,
        "gradients": notes.gradients,
        "weights": notes.weights,
        "notes": () if plan is None or plan.tensor is None else plan.tensor.notes,
    }


def train_all(cases: list[tuple[str, dict[str, Any] | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several runs in one call, for the start of a call costs more than the start of a Trainer."""
    return [train(*case) for case in cases]


def differences(got: dict[str, Any], want: dict[str, Any], tolerance: float = TOLERANCE) -> list[str]:
    """Everything in which two runs differ, in words."""
    found = []
    for step, (ours, theirs) in enumerate(zip(got["metrics"], want["metrics"], strict=True)):
        for name in ours.keys() | theirs.keys():
            if abs(ours[name] - theirs[name]) > tolerance * abs(theirs[name]) + 1e-7:
                found.append(f"{name} at {step}: {ours[name]}, not {theirs[name]}")
    for step, (ours, theirs) in enumerate(zip(got["gradients"], want["gradients"], strict=True)):
        largest = max(float(g.abs().max()) for g in theirs.values())
        found += _off(f"gradient at {step}", ours, theirs, tolerance, largest / 10)
        norms = [float(torch.stack([g.norm() for g in side.values()]).norm()) for side in (ours, theirs)]
        if abs(norms[0] - norms[1]) > 1e-6 * norms[1]:
            found.append(f"norm at {step}: {norms[0]}, not {norms[1]}")
    return found + _off("weights", got["weights"], want["weights"], tolerance, 0.1)


def _off(what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, floor: float) -> list[str]:
    found = [f"{what}: {name} on one side only" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        error = float((ours[name] - theirs[name]).abs().max())
        if error > tolerance * max(float(theirs[name].abs().max()), floor):
            found.append(f"{what} of {name} is off by {error:.2e}")
    return found
