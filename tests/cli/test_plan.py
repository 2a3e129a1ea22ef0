"""``pardist plan`` on scripts and configurations, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_pardist.cli.main import main
from tests.levers.common import data

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.timeout(200)


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = Trainer.__init__, Trainer.fit
    chart = tmp_path / "memory.html"
    script = str(EXAMPLES / "gpt" / "train.py")
    status = main([
        "plan", script, "--args", "--width=32 --depth=2", "--world", "16", "--nodes", "2", "--device", "h100",
        "--precision", "bf16-mixed", "--recompute", "full", "--output", str(chart),
    ])  # fmt: skip
    text = capsys.readouterr().out
    assert status == 0
    assert "data_parallel_replicate  2" in text and "data_parallel_shard      8" in text  # one copy per node
    assert "recomputed   2 of 2" in text
    assert "a lower bound" in text
    assert "<svg" in chart.read_text() and "rank 0" in chart.read_text()
    assert (Trainer.__init__, Trainer.fit) == methods and "__init_subclass__" not in vars(LightningModule)


def test_layouts_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(EXAMPLES / "gpt" / "train.py")
    small = ["--args", "--width=32 --depth=2", "--world", "4", "--device", "memory=40MB", "--layout", "auto", "--json"]
    assert main(["plan", script, *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["layout"] for entry in found} >= {"ddp", "fsdp 4", "fsdp 4, recompute full"}
    told = [entry["estimate"]["memory_by_rank"][0]["total"] for entry in found if entry["estimate"] is not None]
    assert min(told) > 0 and all(entry["rejected"] for entry in found if entry["estimate"] is None)


def test_all_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "memory.html"
    layout = "pipeline_parallel_size=2,tensor_parallel_size=2,data_parallel_shard_size=4"
    status = main([
        "plan", str(EXAMPLES / "gpt" / "train.py"), "--args", "--width=32 --depth=4", "--world", "16", "--nodes", "2",
        "--layout", layout, "--output", str(chart),
    ])  # fmt: skip
    text = capsys.readouterr().out
    assert status == 0
    assert "Pipeline ranks (1f1b, idle" in text and "stage buffers" in text
    assert all(f"{axis}_parallel" in text for axis in ("tensor", "pipeline")) and "send" in text
    page = chart.read_text()
    assert "pipeline parallel 2, data parallel shard 4, tensor parallel 2" in page and "(stage 1)" in page


CONFIG = """
model:
  class_path: tests.levers.common.Net
  init_args: {depth: 3}
data:
  class_path: tests.cli.test_plan.Rows
trainer:
  strategy: pardist_fsdp
  devices: 64
  accelerator: cuda
"""


class Rows(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return data()


def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    assert main(["plan", str(path), "--world", "64", "--nodes", "8"]) == 0
    assert "data_parallel_shard      64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "arguments", "text"),
    [
        ("import no_such_module_at_all", [], "No module named 'no_such_module_at_all'"),
        ("x = 1", [], "without a call of Trainer.fit"),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--x', required=True); p.parse_args()", [],
         "--args"),
        ("x = 1", ["--device", "v100"], "a100, h100, h200, b200"),
        ("x = 1", ["--nodes", "3"], "--world 8 --nodes 3"),
    ],
    ids=["import", "no fit", "arguments", "device", "nodes"],
)  # fmt: skip
def test_what_cannot_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, arguments: list[str], text: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source + "\n")
    assert main(["plan", str(script), "--world", "8", *arguments]) == 1
    error = capsys.readouterr().err
    assert text in error
    assert "Change:" in error
