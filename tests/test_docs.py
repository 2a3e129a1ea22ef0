"""The pages say what is true: Python blocks run on two ranks, YAML sets a strategy, links lead somewhere."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Returns the fenced blocks whose info string is exactly ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class LitModel(L.LightningModule):
    """The module that the pages train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"row": batch[0][:, 0], "out": self(batch[0])}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def run_blocks(sources: list[str]) -> None:
    quiet = partial(
        L.Trainer,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)  # ranks that share a model must see the same batches
    data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
    for source in sources:
        exec(source, {"Trainer": quiet, "LitModel": LitModel, "data": data})


@pytest.mark.parametrize("name", names([page for page in PAGES if blocks(page, "python")]))
def test_python_blocks_run(run_distributed: Any, name: str) -> None:
    run_distributed(run_blocks, blocks(ROOT / name, "python"), world_size=2)


@pytest.mark.parametrize("name", names([page for page in PAGES if blocks(page, "yaml")]))
def test_yaml_blocks_set_a_strategy(name: str) -> None:
    for text in blocks(ROOT / name, "yaml"):
        given = yaml.safe_load(text)["trainer"]["strategy"]
        assert given["class_path"] == "lightning_pardist.HybridStrategy"
        HybridStrategy(**given["init_args"])


@pytest.mark.parametrize("name", names(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{name} links to {target}"
