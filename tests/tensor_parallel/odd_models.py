"""Traits of public models that a tensor-parallel plan went wrong on, each in the smallest module that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensor_parallel.models import GPT, VOCABULARY, Trained
from tests.tensor_plan import models as parts
from tests.tensor_plan.models import HEAD_DIM, HEADS, LENGTH, WIDTH


class GroupedExperts(nn.Module):
    """All experts in one grouped product; its rows must be multiples of 16 bytes, also on two ranks."""

    def __init__(self, experts: int = 3, inner: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.gate_up = nn.Parameter(0.2 * torch.randn(experts, 2 * inner, WIDTH))
        self.down = nn.Parameter(0.2 * torch.randn(experts, WIDTH, inner))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weight, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = F.one_hot(expert, len(self.down)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[order], self.gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return (torch.empty_like(out).index_copy(0, order, out) * weight[:, None]).view(x.shape)


class SinkAttention(nn.Module):
    """Key-value heads repeated by expand, a sink per head, and the weights of attention as a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * HEAD_DIM) for n in (HEADS, 2, 2))
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (repeated(z, HEADS // 2) for z in (k, v))
        scores = q @ k.transpose(-2, -1) / HEAD_DIM**0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, -1)), weights


def repeated(x: Tensor, times: int) -> Tensor:
    b, heads, t, d = x.shape
    return x[:, :, None].expand(b, heads, times, t, d).reshape(b, heads * times, t, d)


class FirstOutput(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class RoomAttention(nn.Module):
    """Keys are copied part by part into fresh memory, whose size the code gives with all heads."""

    def __init__(self, rope: int = 2) -> None:
        super().__init__()
        self.rope = rope
        self.q = nn.Linear(WIDTH, HEADS * (HEAD_DIM + rope))
        self.shared = nn.Linear(WIDTH, rope)
        self.kv = nn.Linear(WIDTH, HEADS * 2 * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        part, v = self.kv(x).view(b, t, HEADS, -1).transpose(1, 2).split(HEAD_DIM, dim=-1)
        k = part.new_empty(b, HEADS, t, HEAD_DIM + self.rope)
        k[..., :HEAD_DIM].copy_(part)
        k[..., HEAD_DIM:].copy_(self.shared(x)[:, None].expand(-1, part.shape[1], -1, -1))
        return self.out(parts.eager(q, k, v).transpose(1, 2).reshape(b, t, -1))


class SharedKeyAttention(nn.Module):
    """One key-value head for all, whole on every rank, multiplied with the queries of each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(WIDTH, 2 * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, dim=-1)
        return self.out(parts.eager(q, k, v).transpose(1, 2).reshape(b, t, -1))


class RelativeAttention(nn.Module):
    """A bias per head from a projection of its own, which another layer contracts inside each head."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.relative, self.profiles = nn.Linear(WIDTH, HEADS * features), nn.Parameter(torch.randn(features, LENGTH))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, HEAD_DIM).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        bias = (self.relative(x).view(b, t, HEADS, -1) @ self.profiles).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[..., :t])
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class CheckedAttention(nn.Module):
    """Heads folded into the rows, as BART's first code has them, and sizes compared with what they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD_DIM) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        q, k, v = (layer(x).view(b, t, -1, HEAD_DIM).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if q.shape != (b, HEADS, t, HEAD_DIM) or q.shape != k.shape:
            raise ValueError(f"queries are {q.shape}")
        q, k, v = (z.reshape(b * HEADS, -1, HEAD_DIM) for z in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2)) / HEAD_DIM**0.5
        if weights.size() != (b * HEADS, t, k.size(1)):
            raise ValueError(f"weights are {weights.size()}")
        weights = weights.view(b, HEADS, t, t) + torch.ones(t, t).tril().log()
        y = torch.bmm(weights.view(b * HEADS, t, t).softmax(-1), v)
        if y.size() != torch.Size([b * HEADS, t, HEAD_DIM]):
            raise ValueError(f"outputs are {y.size()}")
        y = y.view(b, HEADS, t, HEAD_DIM).transpose(1, 2)
        return self.out(y.reshape(b, t, HEADS * HEAD_DIM))


class OwnWidthAttention(nn.Module):
    """The width of a head is worked out from the queries' own width, as the first GPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], HEADS, x.size(-1) // HEADS).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(z) for z in self.qkv(x).split(HEADS * HEAD_DIM, dim=2))
        y = parts.eager(q, k, v).permute(0, 2, 1, 3).contiguous()
        return self.out(y.view(*y.size()[:-2], y.size(-2) * y.size(-1)))


class CoordinateAttention(nn.Module):
    """A bias per head that a small network makes of coordinates, as Swin V2 has it, and a scale per head."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.bias = nn.Sequential(nn.Linear(2, inner), nn.ReLU(), nn.Linear(inner, HEADS, bias=False))
        self.scale = nn.Parameter(torch.linspace(0.5, 2, HEADS).log())
        self.register_buffer("places", torch.cartesian_prod(*[torch.linspace(-1, 1, LENGTH)] * 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * self.scale.reshape(1, HEADS, 1, 1).clamp(max=4.0).exp()
        bias = self.bias(self.places).transpose(1, 0).reshape(HEADS, LENGTH, LENGTH)
        y = (scores + bias.unsqueeze(0)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class CachingAttention(nn.Module):
    """Keeps a bias of all heads while it is evaluated, and its last state; its ``train`` returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.biases = nn.Parameter(torch.randn(HEADS, LENGTH))
        apart = torch.arange(LENGTH)
        self.register_buffer("apart", (apart[:, None] - apart).abs(), persistent=False)
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    # torch's returns the module: not to return it is the trait that is tested (timm's TinyViT does not either).
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.cache = {}

    def bias(self) -> Tensor:
        if self.training:
            return self.biases[:, self.apart]
        if "bias" not in self.cache:
            self.cache["bias"] = self.biases[:, self.apart]
        return self.cache["bias"]

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, HEADS, 3 * HEAD_DIM).transpose(1, 2).chunk(3, dim=-1)
        y = (q @ k.transpose(-2, -1) / HEAD_DIM**0.5 + self.bias()).softmax(-1) @ v
        if self.last is not None and self.last.shape == y.shape and not self.training:
            y = y + 0 * self.last
        self.last = y
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class DepthwiseMLP(nn.Module):
    """A convolution within each feature between the two layers, as in PVT V2 and EfficientViT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Conv1d(4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.mix(self.up(x).transpose(1, 2)).transpose(1, 2)))


class BiasedHead(Trained):
    """A head tied to the embedding that adds a bias, which has its first name elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.bias = nn.Parameter(0.1 * torch.randn(VOCABULARY))
        self.block = parts.Block(parts.GroupedAttention())
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight, self.head.bias = self.tokens.weight, self.bias

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.scored(self.head(self.block(self.tokens(batch[0]))), batch[1])


MODELS: dict[str, Callable[[], Any]] = {
    "grouped experts": lambda: GPT(parts.GroupedAttention, GroupedExperts),
    "sinks": lambda: GPT(lambda: FirstOutput(SinkAttention())),
    "room": lambda: GPT(RoomAttention),
    "shared key": lambda: GPT(SharedKeyAttention),
    "relative": lambda: GPT(RelativeAttention),
    "checked": lambda: GPT(CheckedAttention),
    "own width": lambda: GPT(OwnWidthAttention),
    "coordinates": lambda: GPT(CoordinateAttention),
    "caching": lambda: GPT(CachingAttention),
    "depthwise": lambda: GPT(parts.GroupedAttention, DepthwiseMLP),
    "biased head": BiasedHead,
}
