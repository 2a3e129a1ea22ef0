"""The source code of Python's standard library as bytes: a corpus that every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Chunks(Dataset[Tensor]):
    """Chunks of ``context + 1`` bytes: the last byte of one is the first of the next."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class StandardLibrary(L.LightningDataModule):
    """Trains on most of the standard library's modules and validates on every twentieth of them.

    Args:
        context: bytes that the model looks at.
        batch_size: chunks per device.
        validation_chunks: the most chunks that one validation uses.
        prompts: beginnings for ``predict`` to continue.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 8,
        validation_chunks: int = 256,
        prompts: tuple[str, ...] = ("    def __init__(self, ", "class ", "import os\n", "    if not isinstance("),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = files[::20]
        self.train_text = _read([file for file in files if file not in held_out])
        self.validation_text = _read(held_out)

    def train_dataloader(self) -> DataLoader[Tensor]:
        chunks = Chunks(self.train_text, self.hparams.context)
        return DataLoader(chunks, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        text = self.validation_text[: self.hparams.validation_chunks * self.hparams.context + 1]
        return DataLoader(Chunks(text, self.hparams.context), self.hparams.batch_size)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        prompts = [torch.tensor(list(prompt.encode())) for prompt in self.hparams.prompts]
        return DataLoader(prompts, batch_size=1)  # type: ignore[arg-type]


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
