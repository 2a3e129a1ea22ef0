"""LightningModules whose steps are odd in ways that matter to a pipeline; no line here knows of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.support.modules import (
    GPT,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Block,
    Images,
    Llama,
    OneLoss,
    Seq2Seq,
    SharedWeights,
    Tokens,
    UnusedParameters,
    Vectors,
    ViT,
    WeightPenalty,
    integers,
    numbers,
)


class PlainViT(ViT):
    """Without a metric that normalises logits by what the batch as a whole looks like (AUROC)."""

    def __init__(self) -> None:
        super().__init__()
        self.val_metrics = torchmetrics.MetricCollection(
            {
                "val_accuracy": torchmetrics.classification.MulticlassAccuracy(5, average="macro"),
                "val_kappa": torchmetrics.classification.MulticlassCohenKappa(5),
            }
        )


class DeepGPT(GPT):
    """More blocks than four stages, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(8)])


class SteepGPT(DeepGPT):
    """Without Adam, which divides small gradients by their own size and so makes steps out of their rounding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FrozenStart(DeepGPT):
    """The embeddings and the first blocks do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in (self.wte, self.wpe, *self.blocks[:5]):
            module.requires_grad_(False)


@dataclass
class Texts:
    tokens: Tensor
    names: list[str]
    extra: dict[str, Any]


class SkipGPT(Tokens, L.LightningModule):
    """A skip from the embedding to the head, a dataclass with texts and None as batch.

    Its blocks take keyword arguments and return tuples with None; every second one is recomputed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({f"layer{i}": TupleBlock() for i in range(5)})
        self.scale = nn.Parameter(torch.ones(()))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[str] = []

    @staticmethod
    def collate(items: list[Any]) -> Texts:
        tokens = torch.stack([torch.cat([x, y[-1:]]) for x, y in items])
        return Texts(tokens, [f"text {int(t[0])}" for t in tokens], {"nothing": None, "weight": torch.tensor(2.0)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.embedding(tokens)
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), device=x.device).triu(1)
        gain = start.mean(-1, keepdim=True)
        for index, layer in enumerate(self.layers.values()):
            if index % 2:
                x, gain, _ = checkpoint(layer, hidden=x, mask=mask, gain=gain, use_reentrant=False)
            else:
                x, gain, _ = layer(hidden=x, mask=mask, gain=gain)
        return self.head(self.norm(x + start * self.scale)) + gain

    def loss(self, batch: Texts) -> Tensor:
        assert len(batch.names) == len(batch.tokens) and batch.extra["nothing"] is None
        logits = self(batch.tokens[:, :-1])
        return batch.extra["weight"] * F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:])

    def training_step(self, batch: Texts, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch.tokens))
        self.log("norm_of_start", self.embedding(batch.tokens).norm(dim=-1).mean(), batch_size=len(batch.tokens))
        return {"loss": loss, "names": batch.names}

    def validation_step(self, batch: Texts, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch.tokens))

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.startswith("layers.layer4")], "lr": 0.1},
            {"params": [p for n, p in named.items() if not n.startswith("layers.layer4")]},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class TupleBlock(nn.Module):
    """Takes keyword arguments only, passes one through and changes another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, mask: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, None]:
        y = self.norm(hidden)
        y, _ = self.attention(y, y, y, attn_mask=mask, need_weights=False)
        update = self.mlp(hidden + y).tanh()
        hidden = hidden + y
        hidden += update
        return hidden, gain, None


class Encoder(Tokens, L.LightningModule):
    """``nn.TransformerEncoder`` as it comes; texts of another length in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @staticmethod
    def collate(items: list[Any]) -> dict[str, Tensor]:
        length = 3 + int(items[0][0][0]) % (LENGTH - 2)
        x, y = (torch.stack(column)[:, :length] for column in zip(*items, strict=True))
        return {"x": x, "y": y, "padding": x == 0}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.encoder(self.embedding(batch["x"]), src_key_padding_mask=batch["padding"])
        return F.cross_entropy(self.head(hidden).transpose(1, 2), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "length": float(batch["x"].shape[1])}, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        # Not Adam: keys' biases have a gradient of exactly zero, of which it makes steps out of rounding noise.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class T5(Tokens, OneLoss):
    """Encoder and decoder of transformers: a position bias made in the first blocks, an embedding used three times."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=6, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)


class GPT2(T5):
    """Of transformers: learned positions, tied head."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=16,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip

    def loss(self, batch: Any) -> Tensor:
        return super().loss([batch[0], batch[0]])


class ResidualConv(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(self.norm(x)))


class ConvNet(Images, OneLoss):
    """Everything in one ``nn.Sequential``, of which the middle is a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            *(ResidualConv(8) for _ in range(4)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        )

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class ManyStates(Vectors, OneLoss):
    """The head looks at the outputs of all blocks, as probes and U-shaped networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(5 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return self.head(torch.cat(states, -1)).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, eps=1e-5)


class IdleBlock(SteepGPT):
    """A stack with blocks for images, which a step on text does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: tuple[int, ...] = (2, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for index, block in enumerate(self.blocks):
            if index not in self.idle:
                x = block(x)
        return self.head(self.ln_f(x))


class SharedTables(DeepGPT):
    """Every block takes its part of one mask, a buffer, and of one table of positions, a plain attribute."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
            length = x.shape[1]
            y = self.norm(x) * table[:length].unsqueeze(0)
            x = x + mask[:length, :length].softmax(-1) @ self.attention(y)
            return x + F.gelu(self.mlp(x))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SharedTables.Block() for _ in range(4)])
        self.register_buffer("mask", torch.full((2 * LENGTH, 2 * LENGTH), -1e4).triu(1))
        self.table = 1 + 0.1 * numbers(2 * LENGTH, WIDTH, seed=3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.mask, self.table)
        return self.head(self.ln_f(x))


class InPlace(SteepGPT):
    """Writes into what blocks return: a value that is used right away, and one that skips to the head."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        skip = x
        for index, block in enumerate(self.blocks):
            x = block(x).mul_(0.9)
            if index == 1:
                skip = x
                skip += 0.5
                x = x * 1.5
            x = F.dropout(x, 0.0, inplace=True)
        return self.head(self.ln_f(x + skip))


class DenseLayer(nn.Module):
    """Takes the list of all outputs so far, which goes on growing after the call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, states: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(states, 1))))


class Transition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 16), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(x)))


class DenseNet(ConvNet):
    """Two stacks of blocks between which a step goes to and fro, and lists of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList([nn.ModuleList([DenseLayer(8), DenseLayer(12)]) for _ in range(3)])
        self.transitions = nn.ModuleList([Transition() for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.net(batch[0])
        for layers, transition in zip(self.layers, self.transitions, strict=True):
            states = [x]
            for layer in layers:
                states.append(layer(states))
            x = transition(torch.cat(states, 1))
        return F.cross_entropy(self.head(x.mean((2, 3))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def dataset_of_numbers(rows: int, seed: int) -> Dataset[Any]:
    return torch.utils.data.TensorDataset(numbers(rows, WIDTH, seed=seed), integers(5, rows, seed=seed))


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "gpt": GPT,
    "gpt4": DeepGPT,
    "steep_gpt": SteepGPT,
    "frozen_start": FrozenStart,
    "skip_gpt": SkipGPT,
    "vit": PlainViT,
    "encoder": Encoder,
    "llama": Llama,
    "gpt2": GPT2,
    "t5": T5,
    "seq2seq": Seq2Seq,
    "convnet": ConvNet,
    "many_states": ManyStates,
    "dense": DenseNet,
    "tables": SharedTables,
    "in_place": InPlace,
    "idle": IdleBlock,
    "weight_penalty": WeightPenalty,
    "shared_weights": SharedWeights,
    "unused": UnusedParameters,
}
