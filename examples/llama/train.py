"""Trains a small Llama of Hugging Face transformers, built from a config: ``python examples/llama/train.py``.

The model's code is the library's own, unchanged. The corpus is that of the GPT example, one token per byte.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))  # the data module of the GPT example
from text_data import StandardLibrary


class Llama(L.LightningModule):
    """A Llama with grouped-query attention that predicts the next byte."""

    def __init__(self, hidden_size: int = 128, layers: int = 4, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=hidden_size,
                intermediate_size=2 * hidden_size,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                use_cache=False,
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="pardist_fsdp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=8, help="chunks per process")
    parser.add_argument("--hidden_size", type=int, default=128)
    options = parser.parse_args()

    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        val_check_interval=max(1, options.max_steps // 2),
        gradient_clip_val=1.0,
        limit_val_batches=8,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Llama(options.hidden_size), StandardLibrary(batch_size=options.batch_size))
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"train loss {metrics['train_loss']:.3f}, validation loss {metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
