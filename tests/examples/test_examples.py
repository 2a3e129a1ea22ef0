"""Every example runs as its first line says, only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import transformers_or_skip

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.example


def output(folder: Path, example: str, *arguments: str) -> str:
    """Returns what the example printed; it must have ended well, and it must not need to be run from the repository."""
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def number_after(words: str, text: str) -> float:
    """Returns the last number that follows these words."""
    found = re.findall(re.escape(words) + r"\s*([0-9.]+)", text)
    assert found, text
    return float(found[-1])


SMALL_GPT = ("--max_steps=16", "--width=32", "--depth=2")


@pytest.fixture(scope="module")
def gpt_on_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the GPT example prints on two processes."""
    return output(tmp_path_factory.mktemp("gpt"), "gpt/train.py", *SMALL_GPT, "--devices=2", "--batch_size=4")


def test_gpt_learns_and_its_module_does_not_name_this_package(gpt_on_two: str) -> None:
    for file in ("gpt_module.py", "text_data.py", "train.py"):
        assert "lightning_pardist" not in (EXAMPLES / "gpt" / file).read_text()
    text = gpt_on_two
    assert 1 < number_after("validation:", text) < 7.5
    assert "data_parallel_shard" in text  # the plan is shown
    assert "A sample:" in text
    assert text.count("16 steps on 2 processes") == 1  # by one process only


def test_gpt_in_one_process_reaches_the_same(tmp_path: Path, gpt_on_two: str) -> None:
    alone = output(tmp_path, "gpt/train.py", *SMALL_GPT, "--strategy=auto", "--devices=1", "--batch_size=8")
    # Lightning's sampler deals other samples to two processes than one process shuffles, so only roughly.
    assert number_after("validation:", alone) == pytest.approx(number_after("validation:", gpt_on_two), abs=0.3)


@pytest.mark.hf
def test_llama(tmp_path: Path) -> None:
    transformers_or_skip()
    text = output(tmp_path, "llama/train.py", "--max_steps=8", "--batch_size=2", "--hidden_size=32")
    assert number_after("validation loss", text) < 5.5


def test_convnet(tmp_path: Path) -> None:
    text = output(tmp_path, "convnet/train.py", "--images=512", "--max_epochs=3")
    assert number_after("accuracy: train", text) > 0.4  # one in four by chance


CLI_SMALL = (
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.enable_progress_bar=false",
    "--data.validation_chunks=8",
    "--model.width=32",
)


def test_lab(tmp_path: Path) -> None:
    text = output(tmp_path, "lab/lab.py", "--steps", "2", "4")
    assert "All checks passed." in text and "WRONG" not in text


def test_cli_with_the_strategy_by_name(tmp_path: Path) -> None:
    text = output(tmp_path, "cli/main.py", "fit", f"--config={EXAMPLES / 'cli' / 'by_name.yaml'}", *CLI_SMALL)
    assert "max_steps=4` reached" in text
    assert "data_parallel_shard      2" in text


def test_cli_with_the_strategy_by_class_and_its_saved_config_reloads(tmp_path: Path) -> None:
    config = f"--config={EXAMPLES / 'cli' / 'by_class_path.yaml'}"
    text = output(tmp_path, "cli/main.py", "fit", config, *CLI_SMALL)
    assert "max_steps=4` reached" in text
    assert "data_parallel_replicate  2" in text
    assert "data_parallel_shard      2" in text
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    assert output(tmp_path, "cli/main.py", "fit", f"--config={saved}", "--print_config").strip() in saved.read_text()
