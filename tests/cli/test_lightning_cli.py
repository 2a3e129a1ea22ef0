"""LightningCLI sets the strategy by name and by class, from a file and from the command line."""

from __future__ import annotations

import inspect
import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist import HybridStrategy
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

COMMON: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_steps": 4,
    "log_every_n_steps": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": ".", "name": "logs"}},
}
BY_CLASS = {
    "class_path": "lightning_pardist.HybridStrategy",
    "init_args": {
        "data_parallel_replicate_size": 1,
        "data_parallel_shard_size": 2,
        "zero_stage": 2,
        "fsdp_units": ["Block", "head"],
        "gradient_clip_norm_type": 1.0,
        "timeout": "0:05:00",
    },
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Model(L.LightningModule):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.head(self.blocks(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size)


def run(*args: str) -> LightningCLI:
    return LightningCLI(Model, Data, args=["fit", *args])


def write_config(strategy: Any) -> str:
    """Writes a configuration with this strategy and returns the option that names it."""
    path = f"given-{os.environ['RANK']}.yaml"
    Path(path).write_text(yaml.safe_dump({"seed_everything": 1, "trainer": {**COMMON, "strategy": strategy}}))
    return f"--config={path}"


def what_was_set(strategy: HybridStrategy) -> dict[str, Any]:
    plan = strategy.plan
    assert plan is not None
    return {
        "class": type(strategy).__name__,
        "config": strategy.config,
        "stage": plan.data_parallel.zero_stage,
        "units": [unit.modules for unit in plan.data_parallel.units],
        "timeout": strategy._timeout.total_seconds(),  # type: ignore[union-attr]
    }


def losses(version: int) -> list[str]:
    return Path(f"logs/version_{version}/metrics.csv").read_text().splitlines()


def fit_in_every_form() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["name"] = what_was_set(run(write_config("pardist_fsdp")).trainer.strategy)
    found["class"] = what_was_set(run(write_config(BY_CLASS)).trainer.strategy)
    options = [f"--trainer.strategy.{key}={value}" for key, value in BY_CLASS["init_args"].items()]  # type: ignore[attr-defined]
    line = run(write_config("auto"), "--trainer.strategy=lightning_pardist.HybridStrategy", *options)
    found["line"] = what_was_set(line.trainer.strategy)
    found["line by name"] = what_was_set(run(write_config("auto"), "--trainer.strategy=pardist_zero1").trainer.strategy)
    found["saved"] = yaml.safe_load(Path("logs/version_1/config.yaml").read_text())["trainer"]["strategy"]
    found["again"] = what_was_set(run("--config=logs/version_1/config.yaml").trainer.strategy)
    line.trainer.strategy.barrier()
    found["losses"], found["losses again"] = losses(1), losses(4)
    return found


def test_every_form_sets_the_strategy_and_the_saved_config_reloads(run_distributed: Any) -> None:
    found = run_distributed(fit_in_every_form, world_size=2)[0]
    assert found["name"]["stage"] == 3
    assert found["line by name"]["stage"] == 1
    for form in ("class", "line", "again"):
        assert found[form] == found["class"]
    assert found["class"]["stage"] == 2
    assert found["class"]["config"].data_parallel_shard_size == 2
    assert found["class"]["units"] == [("blocks.0",), ("blocks.1",), ("head",), ("",)]
    assert found["class"]["timeout"] == 300
    assert found["saved"]["class_path"] == "lightning_pardist.HybridStrategy"
    assert {key: found["saved"]["init_args"][key] for key in BY_CLASS["init_args"]} == BY_CLASS["init_args"]  # type: ignore[attr-defined]
    assert found["losses"] == found["losses again"]
    assert len(found["losses"]) == 5


def fit_with_the_callback() -> dict[str, float]:
    cli = run(
        write_config("pardist_hybrid"),
        "--trainer.callbacks+=lightning_pardist.callbacks.ParallelThroughput",
        "--trainer.callbacks.every_n_steps=1",
    )
    (callback,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "ParallelThroughput")  # type: ignore[attr-defined]
    return callback.last_report  # type: ignore[attr-defined]


def test_callbacks_by_class_path(run_distributed: Any) -> None:
    assert run_distributed(fit_with_the_callback, world_size=2)[0]["samples_per_second"] > 0


@pytest.fixture
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["test"])  # LightningCLI warns if there are both


@pytest.mark.usefixtures("_no_arguments")
def test_help_shows_every_argument() -> None:
    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        run("--trainer.strategy.help=lightning_pardist.HybridStrategy")
    parameters = set(inspect.signature(HybridStrategy).parameters)
    assert len(parameters) > 15
    missing = [name for name in parameters if f"--trainer.strategy.{name}" not in text.getvalue()]
    assert missing == []
    assert "0 replicates, 1 shards optimizer state, 2 also" in " ".join(text.getvalue().split())


@pytest.mark.usefixtures("_no_arguments")
def test_options_that_are_dataclasses_and_classes() -> None:
    options = {
        "checkpoint.async_save": "true",
        "checkpoint.storage_options": "{anon: true}",
        "accelerator": "CPUAccelerator",
        "cluster_environment": "LightningEnvironment",
        "precision_plugin": "Precision",
    }
    line = [f"--trainer.strategy.{name}={value}" for name, value in options.items()]
    line += ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    cli = LightningCLI(Model, Data, args=["--trainer.strategy=lightning_pardist.HybridStrategy", *line], run=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, HybridStrategy)
    assert strategy._keeper.options == CheckpointOptions(async_save=True, storage_options={"anon": True})
    assert type(strategy.cluster_environment).__name__ == "LightningEnvironment"


@pytest.mark.usefixtures("_no_arguments")
def test_a_value_of_the_wrong_type_is_refused_by_the_parser() -> None:
    text = io.StringIO()
    with redirect_stderr(text), pytest.raises(SystemExit) as stopped:
        run("--trainer.strategy=lightning_pardist.HybridStrategy", "--trainer.strategy.zero_stage=7")
    assert stopped.value.code == 2
    assert "zero_stage" in text.getvalue()
    assert "Literal[0, 1, 2, 3]" in text.getvalue()


def fit_with(**options: Any) -> None:
    run(write_config({"class_path": "lightning_pardist.HybridStrategy", "init_args": options}))


def three_shards() -> None:
    fit_with(data_parallel_shard_size=3)


def no_shards() -> None:
    fit_with(data_parallel_shard_size=0)


def unknown_unit() -> None:
    fit_with(fsdp_units=["Blok"])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (three_shards, "The sizes of the mesh axes must multiply to the number of ranks."),
        (no_shards, "data_parallel_shard_size must be a positive integer or 'auto'."),
        (unknown_unit, "'Blok' matches nothing"),
    ],
)
def test_wrong_values_are_told_in_four_parts_on_every_rank(run_distributed: Any, function: Any, text: str) -> None:
    errors = run_distributed.errors(function, world_size=2)
    assert all(isinstance(error, ValueError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])
    # The parser indents what a constructor says.
    assert all(f"  {part}: " in str(errors[0]) for part in ("Got", "From", "Change"))
