"""Trains the byte-level GPT on four processes: ``python examples/gpt/train.py``.

Ordinary Lightning code. The only trace of sharding is the word after ``strategy=``; ``--strategy auto --devices 1``
trains the same model in one process.
"""

from __future__ import annotations

import argparse
import time

import lightning as L
import torch
from gpt_module import GPT
from lightning.pytorch.utilities import rank_zero_only
from text_data import StandardLibrary
from torch import Tensor


class PrintProgress(L.Callback):
    """Prints a line every few steps, which reads better than a progress bar where output goes to a file."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.tokens = 0
        self.seconds = 0.0
        self.started = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Over all processes, validation not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: Tensor, batch_idx: int
    ) -> None:
        self.seconds += time.perf_counter() - self.started
        self.tokens += batch[:, 1:].numel() * trainer.world_size
        step = trainer.global_step
        if step % self.every == 0 or step == 1:
            self._print(
                f"step {step:4d} of {trainer.max_steps}   train loss {trainer.callback_metrics['train_loss']:.3f}   "
                f"{self.tokens_per_second:,.0f} tokens/s"
            )

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._print(f"{'':17}validation {trainer.callback_metrics['val_bits_per_byte']:.3f} bits per byte")

    @rank_zero_only
    def _print(self, line: str) -> None:
        print(line, flush=True)


def bits_per_byte_of_frequencies(text: Tensor) -> float:
    """Returns what a model reaches that knows only how often each byte occurs: the number to beat."""
    share = torch.bincount(text.int(), minlength=256) / len(text)
    return -(share * share.clamp_min(1e-12).log2()).sum().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="pardist_hybrid")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--batch_size", type=int, default=8, help="chunks per process")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    options = parser.parse_args()

    L.seed_everything(1, verbose=False)
    model = GPT(width=options.width, depth=options.depth)
    data = StandardLibrary(batch_size=options.batch_size)
    progress = PrintProgress(every=20)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_steps=options.max_steps,
        val_check_interval=max(1, options.max_steps // 4),
        gradient_clip_val=1.0,
        callbacks=[progress],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    seconds = time.perf_counter() - start
    bits_per_byte = trainer.callback_metrics["val_bits_per_byte"]
    (sample, *_) = trainer.predict(model, data)  # each process continues prompts of its own; this is process 0's

    if trainer.is_global_zero:
        text = bytes(sample[0].tolist()).decode(errors="replace")
        print(
            f"\n{trainer.global_step} steps on {trainer.world_size} processes in {seconds:.0f} s, "
            f"{progress.tokens_per_second:,.0f} tokens/s\n"
            f"validation: {bits_per_byte:.3f} bits per byte "
            f"(byte frequencies alone: {bits_per_byte_of_frequencies(data.validation_text):.3f}; untrained: 8)\n"
            f"\nA sample:\n\n{text}"
        )


if __name__ == "__main__":
    main()
