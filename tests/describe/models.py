"""Modules of different shape, written as users write them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(L.LightningModule):
    """nanoGPT's shape: fused qkv, learned positions, head tied to the embedding."""

    def __init__(self, vocabulary: int = 96, width: int = 32, blocks: int = 3, length: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(-1) == targets).float().mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def gpt_batch(vocabulary: int = 96, rows: int = 2, length: int = 16) -> Any:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(2))


class StepModule(L.LightningModule):
    """A network whose loss is the mean square of its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = self.drop(torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos)
        return self.head(self.norm(self.blocks(x))[:, 0])


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


class Experts(nn.Module):
    """Every expert on every token, weighted: a mixture without data-dependent shapes."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(y) for i, expert in enumerate(self.experts))


class RecurrentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 24, num_layers=2, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class GAN(L.LightningModule):
    """Manual optimization with two optimizers, toggled, and schedulers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()
        noise = torch.randn(len(batch), 8, device=self.device)
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        self.clip_gradients(opt_g, 1.0, "norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        fake = self.generator(noise).detach()
        loss_d = F.softplus(-self.discriminator(batch)).mean() + F.softplus(self.discriminator(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"g": loss_g, "d": loss_d.item()})

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 10) for optimizer in optimizers]


class Names(nn.Module):
    """A module of named children called in turn by their order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                for block in child.values() if isinstance(child, nn.ModuleDict) else child:
                    x = block(x)
            else:
                x = child(x)
        return x
