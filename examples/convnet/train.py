"""Trains a ConvNet with batch norms on drawn shapes: ``python examples/convnet/train.py``.

The images are drawn by the program: discs, squares, triangles and crosses of random size, place and contrast, in
noise. ``sync_batchnorm=True`` makes the statistics those of the global batch, as in one process; the accuracy is a
torchmetrics object, whose counts are summed over the processes.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

SHAPES = ("disc", "square", "triangle", "cross")


def draw(count: int, seed: int, size: int = 24) -> TensorDataset:
    """Returns ``count`` images (1, size, size) with the number of the shape on each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    radius = torch.empty(count, 1, 1).uniform_(4, 8, generator=generator)
    centre = torch.empty(count, 2, 1, 1).uniform_(size / 2 - 3, size / 2 + 3, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
    y, x = ((grid - centre) / radius[:, None]).unbind(1)  # each shape is drawn in the square from -1 to 1
    inside = x.abs().maximum(y.abs()) < 1
    drawn = torch.stack(
        [
            x.square() + y.square() < 1,
            inside,
            inside & (2 * x.abs() < y + 1),
            inside & (x.abs().minimum(y.abs()) < 0.35),
        ],
        dim=1,
    )[torch.arange(count), labels]
    contrast = torch.empty(count, 1, 1).uniform_(0.5, 1.5, generator=generator)
    images = drawn * contrast + 0.4 * torch.randn(count, size, size, generator=generator)
    return TensorDataset(images[:, None], labels)


def convolution(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class ConvNet(L.LightningModule):
    """Four convolutions, a mean over the image, a linear layer."""

    def __init__(self, width: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            convolution(1, width, 1),
            convolution(width, 2 * width, 2),
            convolution(2 * width, 2 * width, 1),
            convolution(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(4 * width, len(SHAPES))
        self.train_accuracy = MulticlassAccuracy(len(SHAPES))
        self.val_accuracy = MulticlassAccuracy(len(SHAPES))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", default="pardist_zero2")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=2048)
    options = parser.parse_args()

    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.max_epochs,
        sync_batchnorm=True,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(
        ConvNet(),
        DataLoader(draw(options.images, seed=1), batch_size=32, shuffle=True, drop_last=True),
        DataLoader(draw(512, seed=2), batch_size=32),
    )
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        print(f"accuracy: train {metrics['train_accuracy']:.3f}, validation {metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
