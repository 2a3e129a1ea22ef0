"""PlanFile: the plan beside the logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_pardist.callbacks import PlanFile


def fit() -> str:
    trainer = L.Trainer(
        strategy="pardist_fsdp",
        accelerator="cpu",
        devices=2,
        max_steps=1,
        limit_val_batches=0,
        callbacks=[PlanFile()],
        logger=CSVLogger(".", name="logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    return str(trainer.strategy.plan.to_json())


def fit_and_read() -> tuple[str, str, list[str]]:
    plan = fit()
    files = sorted(str(path) for path in Path("logs").rglob("plan.json"))
    return plan, Path(files[0]).read_text(), files


def test_the_plan_is_written_once_beside_the_logs(run_distributed: Any) -> None:
    results = run_distributed(fit_and_read, world_size=2)
    plan, text, files = results[0]
    assert text == plan + "\n"
    assert files == ["logs/version_0/plan.json"]
    read = json.loads(text)
    assert read["sizes"]["data_parallel_shard"] == 2
    assert read["data_parallel"]["kind"] == "shard"
