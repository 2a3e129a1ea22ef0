"""One LightningModule with everything that a parallelism could trip over; no line here knows of any."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 43, 8, 24, 4, 6


class Attention(nn.Module):
    """One fused projection, split in three; the number of heads is written down here."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x)) * scale
        return x + self.mlp(self.norm2(x))


class Headline(L.LightningModule):
    """Nested containers, tied embeddings, a skip from the embedding to the head, batches that are dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.ModuleDict(
            {
                "inputs": nn.ModuleDict({"words": nn.Embedding(VOCABULARY, WIDTH), "places": nn.Embedding(16, WIDTH)}),
                "tower": nn.ModuleDict({"layers": nn.ModuleList([Block() for _ in range(DEPTH)])}),
            }
        )
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.body["inputs"]["words"].weight
        nn.init.normal_(self.head.weight, std=0.1)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(VOCABULARY, average="micro")

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, layers = self.body["inputs"], self.body["tower"]["layers"]
        x = start = inputs["words"](tokens) + inputs["places"](torch.arange(tokens.shape[1], device=tokens.device))
        scale = 1 + tokens.float().mean(1)[:, None, None] / VOCABULARY  # a tensor for every block
        for layer in layers:
            x = layer(x, scale=scale)
        return self.head(self.norm(x + self.gain * start))

    def _loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert len(batch["names"]) == len(batch["tokens"])
        logits = self(batch["tokens"])
        return F.cross_entropy(logits.view(-1, VOCABULARY), batch["targets"].reshape(-1)), logits

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss, logits = self._loss(batch)
        self.log("loss", loss, batch_size=len(batch["tokens"]), on_step=True, on_epoch=True)
        self.log("right", (logits.argmax(-1) == batch["targets"]).float().mean(), batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss, logits = self._loss(batch)
        self.accuracy(logits.flatten(0, 1), batch["targets"].flatten())
        self.log("val_loss", loss, batch_size=len(batch["tokens"]), sync_dist=True)
        self.log("val_accuracy", self.accuracy, batch_size=len(batch["tokens"]))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch)[0], batch_size=len(batch["tokens"]), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"names": batch["names"], "logits": self(batch["tokens"])}

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, rows: int, seed: int) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = self.tokens[row]
        return {"tokens": tokens[:-1], "targets": tokens[1:], "names": f"text {row}"}
