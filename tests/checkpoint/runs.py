"""A small training run in plain torch, in several layouts: what the checkpoint tests save and load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_pardist.checkpoint import TrainState

LAYOUTS = {"single": 1, "fsdp4": 4, "hybrid2x2": 4, "ddp2": 2}
"""Name and world size. A further layout joins every matrix by a line here and a branch in ``spread``."""
BATCH, LENGTH, VOCABULARY, WIDTH = 8, 5, 11, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)  # 7 rows over 4 ranks: uneven
        self.down = nn.Linear(7, width)
        self.gain = nn.Parameter(torch.full((3,), 0.3))  # 3 elements over 4 ranks: one shard is empty

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain.sum()


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.blocks[0].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Run:
    module: nn.Module
    root: nn.Module
    """What is called: the module, or the wrapper around it."""
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any] = field(default_factory=list)

    def state(self, **more: Any) -> TrainState:
        trainer = {"lr_schedulers": [s.state_dict() for s in self.schedulers]}
        return TrainState(self.module, self.optimizers, trainer, **more)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def control() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def build(layout: str, *, width: int = WIDTH, dtype: torch.dtype = torch.float32, optimizer: str = "adamw") -> Run:
    torch.manual_seed(5)
    module = Model(width).to(dtype)
    root = spread(layout, module)
    decay = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "lr": 0.01},
        {"params": rest, "lr": 0.02, "weight_decay": 0.0, "tag": "rest"},
    ]
    made: torch.optim.Optimizer
    if optimizer == "adamw":
        made = torch.optim.AdamW(groups)
    else:
        made = torch.optim.SGD(groups, momentum=0.9 if optimizer == "momentum" else 0.0)
    return Run(module, root, [made], [torch.optim.lr_scheduler.StepLR(made, 2, gamma=0.5)])


def spread(layout: str, module: nn.Module) -> nn.Module:
    if layout == "single":
        return module
    if layout == "ddp2":
        return DistributedDataParallel(module)
    shape = {"fsdp4": (4,), "hybrid2x2": (2, 2)}[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def train(run: Run, steps: range) -> list[float]:
    """Returns the global batch's loss of every step."""
    rank, size = world()
    losses = []
    for step in steps:
        loss = run.root(batch(step).chunk(size)[rank])
        loss.backward()
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in run.schedulers:
            scheduler.step()
        total = loss.detach().float()
        if size > 1:
            dist.all_reduce(total)
        losses.append(float(total) / size)
    return losses


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in module.state_dict().items()}


def optimizer_state(run: Run) -> dict[str, Any]:
    """State by parameter name, whole, and group options."""
    names = {id(p): n for n, p in run.module.named_parameters()}
    out: dict[str, Any] = {}
    for index, optimizer in enumerate(run.optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                out[f"{index}.{names[id(parameter)]}.{key}"] = whole(value) if isinstance(value, Tensor) else value
        for number, group in enumerate(optimizer.param_groups):
            out[f"{index}.group{number}"] = {k: v for k, v in group.items() if k != "params"}
    return out


def same(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Returns the names that differ by a bit, in dtype or in presence."""
    wrong = sorted(first.keys() ^ second.keys())
    for name in first.keys() & second.keys():
        a, b = first[name], second[name]
        if isinstance(a, Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                wrong.append(name)
        elif a != b:
            wrong.append(name)
    return wrong
