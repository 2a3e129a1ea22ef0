"""Small modules of every kind of linear layer; unequal sizes wherever a mix-up could hide behind equal ones."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD_DIM, VOCABULARY, LENGTH, ROWS = 24, 4, 6, 97, 5, 3


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v


class FusedAttention(nn.Module):
    """q, k and v in one weight, taken apart in one of the usual ways, with a hard-coded number of heads."""

    def __init__(
        self, how: Literal["split", "chunk", "view", "unflatten", "slice", "interleaved"], attend: Any = causal
    ) -> None:
        super().__init__()
        self.how, self.attend = how, attend
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.qkv(x)
        inner = HEADS * HEAD_DIM
        if self.how == "view":
            q, k, v = y.reshape(b, t, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        elif self.how == "unflatten":
            q, k, v = y.unflatten(-1, (3, HEADS, HEAD_DIM)).transpose(1, 3).unbind(2)
        elif self.how == "interleaved":
            q, k, v = y.view(b, t, HEADS, 3 * HEAD_DIM).transpose(1, 2).chunk(3, dim=-1)
        else:
            if self.how == "split":
                q, k, v = y.split(inner, dim=2)
            elif self.how == "chunk":
                q, k, v = y.chunk(3, dim=-1)
            else:
                q, k, v = y[..., :inner], y[..., inner : 2 * inner], y[..., 2 * inner :]
            q, k, v = (z.view(b, t, HEADS, HEAD_DIM).transpose(1, 2) for z in (q, k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedMLP(nn.Module):
    """gate and up in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 40, bias=False), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), attention
        self.norm_2, self.mlp = nn.LayerNorm(WIDTH), mlp or MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, blocks: list[nn.Module], *, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GroupedAttention(nn.Module):
    """Fewer key-value heads than query heads; with or without one fused weight, norms per head or over all heads."""

    def __init__(self, *, fused: bool = False, norm: Literal["none", "head", "all"] = "none", groups: int = 2) -> None:
        super().__init__()
        self.groups, self.fused = groups, fused
        self.q_size, self.kv_size = HEADS * HEAD_DIM, groups * HEAD_DIM
        if fused:
            self.qkv = nn.Linear(WIDTH, self.q_size + 2 * self.kv_size)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n) for n in (self.q_size, self.kv_size, self.kv_size))
        self.norm_per_head = norm == "head"
        if norm == "head":
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        elif norm == "all":
            self.q_norm, self.k_norm = nn.RMSNorm(self.q_size), nn.RMSNorm(self.kv_size)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.out = nn.Linear(self.q_size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if self.fused:
            q, k, v = self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (z.view(b, t, -1, HEAD_DIM) for z in (q, k, v))
        if self.norm_per_head:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class LatentAttention(nn.Module):
    """Low-rank projections with a norm between them, and a rotary part that all heads share (MLA)."""

    def __init__(self, rank: int = 10, rope: int = 2) -> None:
        super().__init__()
        self.rank, self.rope = rank, rope
        self.q_a, self.q_norm = nn.Linear(WIDTH, rank), nn.RMSNorm(rank)
        self.q_b = nn.Linear(rank, HEADS * (HEAD_DIM + rope))
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, rank + rope), nn.RMSNorm(rank)
        self.kv_b = nn.Linear(rank, HEADS * 2 * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(b, t, HEADS, -1).transpose(1, 2)
        latent, rope = self.kv_a(x).split([self.rank, self.rope], dim=-1)
        k, v = self.kv_b(self.kv_norm(latent)).view(b, t, HEADS, -1).transpose(1, 2).split([HEAD_DIM, HEAD_DIM], dim=-1)
        k = torch.cat([k, rope[:, None].expand(b, HEADS, t, self.rope)], dim=-1)
        return self.out(eager(q, k, v).transpose(1, 2).reshape(b, t, -1))


class ViT(nn.Module):
    """Patches by convolution, class token, learned positions, a head over classes."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Functional(nn.Module):
    """Weights without layers: F.linear, and matmul with transposed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.b_in = nn.Parameter(torch.randn(32, WIDTH)), nn.Parameter(torch.randn(32))
        self.w_out = nn.Parameter(torch.randn(WIDTH, 32))
        self.v_in, self.v_out = nn.Parameter(torch.randn(28, WIDTH)), nn.Parameter(torch.randn(28, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(torch.tanh(F.linear(x, self.w_in, self.b_in)), self.w_out)
        return x + torch.matmul(torch.relu(x @ self.v_in.t()), self.v_out)


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def hidden() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
