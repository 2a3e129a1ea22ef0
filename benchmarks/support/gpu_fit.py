"""The training that ``benchmarks/support/gpu_runs.py`` repeats in several ways, and what is noted of a run."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.support.gpt import BenchmarkGPT, RandomRows, planned_state_bytes, quiet
from benchmarks.support.one_rank_mesh import OneRankMesh
from lightning_pardist import HybridStrategy

STEPS = 8


@dataclass(frozen=True)
class Size:
    """Shape of the model and of the global batch."""

    width: int = 1024
    depth: int = 12
    heads: int = 16
    context: int = 1024
    rows: int = 8


TINY = Size(width=32, depth=2, heads=2, context=16, rows=8)


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: str
    size: Size
    clip: float = 0.5

    @property
    def backend(self) -> str:
        """What the device's own collectives are called."""
        return "nccl" if self.device == "cuda" else "gloo"


class CompilableGPT(BenchmarkGPT):
    """The same, with blocks that it may compile itself."""

    learning_rate = 3e-4
    compiles_blocks = False

    def configure_model(self) -> None:
        if self.compiles_blocks:
            for block in self.blocks:
                block.compile()


class FewRows(RandomRows):
    """The same few again and again, which a model can learn by heart: the loss falls."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index % 16)


class Notes(L.Callback):
    """Losses and gradient norms of every step; stops at ``pause`` before each."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self._pause = pause

    def on_train_batch_start(self, *args: Any) -> None:
        self._pause()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        self.norms.append(torch.nn.utils.get_total_norm(whole))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].detach())


def fit(
    setting: Setting, strategy: Any, precision: str, *, steps: int, callbacks: list[L.Callback], **options: Any
) -> L.Trainer:
    """Trains the GPT for some steps; ``compiles``, ``ranks`` and ``resume`` are ours, the rest is the Trainer's."""
    size, ranks = setting.size, options.pop("ranks", 1)
    compiles, resume = options.pop("compiles", False), options.pop("resume", None)
    torch.manual_seed(0)
    module = CompilableGPT(width=size.width, depth=size.depth, heads=size.heads, context=size.context)
    module.compiles_blocks = compiles
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=setting.device,
        devices=1,
        num_nodes=ranks,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        gradient_clip_val=setting.clip,
        callbacks=callbacks,
        **quiet(**options),
    )
    rows = FewRows(size.rows * 100, size.context)
    trainer.fit(module, DataLoader(rows, size.rows // ranks), ckpt_path=resume)
    return trainer


def one_run(setting: Setting, strategy: Any, precision: str, **options: Any) -> dict[str, Any]:
    """Returns what a run of its own came to: losses, norms, the peak of device memory, and what the plan foretold."""
    gc.collect()
    base = 0
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    notes = Notes()
    trainer = fit(setting, strategy, precision, callbacks=[notes], **{"steps": STEPS, **options})
    found: dict[str, Any] = {"losses": [float(x) for x in notes.losses], "norms": [float(x) for x in notes.norms]}
    if setting.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - base
    model = getattr(trainer.strategy, "parallel_model", None)
    if model is not None and model.profile is not None:
        found |= {
            "kind": model.kind,
            "backend": trainer.strategy.process_group_backend,
            "parameters": model.profile.num_parameters,
            "state_bytes": planned_state_bytes(model),
            "activation_bytes": model.profile.saved_activation_bytes,
        }
    return found


def attempt(fn: Callable[[], Any]) -> Any:
    """Returns what ``fn`` returns, or what it failed with as text."""
    try:
        return fn()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-4000:]}


def mesh_of_one(setting: Setting, **options: Any) -> HybridStrategy:
    """A strategy that shards over a mesh of one rank."""
    return OneRankMesh(print_plan=False, **{"process_group_backend": setting.backend, **options})
