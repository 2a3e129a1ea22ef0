"""A model in which everything that recomputation can get wrong is in a block: dropout, batch norm, a bare scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.common import make_trainer, whole

WIDTH, ROWS = 16, 8


class Block(nn.Module):
    def __init__(self, dropout: float, batch_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), attn_mask=mask)
        y = self.out(attended.transpose(1, 2).flatten(2))
        y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        return x + self.scale * self.drop(F.gelu(y))


class Net(L.LightningModule):
    def __init__(self, dropout: float = 0.0, depth: int = 4, batch_norm: bool = True) -> None:
        super().__init__()
        self.inp = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, batch_norm) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        return self.head(hidden).mean((1, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Seen:
    """What must not depend on recomputation."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    dtypes: set[str] = field(default_factory=set)
    plan: dict[str, Any] | None = None
    text: str = ""


class Notes(L.Callback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.seen.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.losses.append(float(trainer.callback_metrics["loss"]))


def data(peers: int = 1) -> DataLoader:
    """Rows that are the same for ``peers`` ranks at a time."""
    x = torch.randn(3 * ROWS, 6, 4, generator=torch.Generator().manual_seed(3))
    rows = ROWS * peers // (dist.get_world_size() if dist.is_initialized() else 1)
    return DataLoader(TensorDataset(x, x.sum((1, 2)).tanh()), batch_size=rows)


def assert_same_run(ours: Seen, theirs: Seen, tolerance: float = 0.0) -> None:
    """Losses and everything in the state dict agree; of the losses the relative difference counts alone."""
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=0)
    assert ours.state.keys() == theirs.state.keys()
    for name, value in theirs.state.items():
        torch.testing.assert_close(ours.state[name], value, rtol=tolerance, atol=tolerance, msg=name)


def train(arguments: dict[str, Any] | None, make: Callable[[], L.LightningModule] = Net, **options: Any) -> Seen:
    """Three steps and a validation; ``arguments`` of the strategy, None for plain Lightning."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    module = make()
    notes = Notes()
    torch.manual_seed(100 + rank)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trainer = make_trainer(arguments, world_size, callbacks=[notes], **options)
    peers = math.prod((arguments or {}).get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor"))
    trainer.fit(module, data(peers), data(peers))
    notes.seen.state = {name: whole(value) for name, value in module.state_dict().items()}
    return notes.seen
