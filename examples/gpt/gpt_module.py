"""A byte-level GPT as a plain LightningModule: nothing in this file knows on how many devices it trains."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte


class Attention(nn.Module):
    """Causal self-attention with one fused projection for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(L.LightningModule):
    """Predicts the next byte.

    Args:
        width: size of the hidden state.
        depth: number of blocks.
        heads: attention heads per block.
        context: the most bytes it can look back.
        dropout: probability of dropping a value on a residual branch.
        learning_rate: the peak, after the warm-up.
        weight_decay: of the matrices; norms and biases have none.
        warmup_steps: optimizer steps until the peak learning rate.
        sample_length: bytes that ``predict`` adds to each prompt.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        sample_length: int = 160,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)
        self.head.weight = self.token_embedding.weight  # tied: the head reads with what the embedding wrote

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the byte after each byte: (batch, length) -> (batch, length, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _loss(self, chunk: Tensor) -> Tensor:
        logits = self(chunk[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the prompts with ``sample_length`` likely bytes added to each: (batch, length + sample_length)."""
        tokens = batch
        for _ in range(self.hparams.sample_length):
            logits = self(tokens[:, -self.hparams.context :])[:, -1]
            likely = logits.topk(10).values[:, -1:]
            weights = F.softmax(logits.masked_fill(logits < likely, -torch.inf) / 0.8, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(weights, 1)], dim=1)
        return tokens

    def configure_optimizers(self) -> dict[str, object]:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": others, "weight_decay": 0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        total = int(self.trainer.estimated_stepping_batches)
        warmup = self.hparams.warmup_steps

        def factor(step: int) -> float:
            """Linear up to the peak, then half a cosine down to a tenth of it."""
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
