"""ModelCheckpoint with folders on all ranks: removals, links, remote paths, and one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
from fsspec.core import url_to_fs
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_pardist.checkpoint import lock
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.resume.common import LAYOUTS, Losses, Tower, attempt, make_trainer, numbered, weights
from tests.strategies.common import assert_same_weights


class Watch(L.Callback):
    """Looks at the folder after every save, on every rank."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = folder, []  # type: ignore[var-annotated]

    def look(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.strategy.barrier()
        names = [name for name in sorted(os.listdir(self.folder)) if not name.startswith(".")]
        dangling = [name for name in names if not os.path.exists(f"{self.folder}/{name}/manifest.json")]
        self.seen.append((names, dangling))
        trainer.strategy.barrier()

    on_train_batch_start = on_train_end = look


def removing(folder: str, save_last: Any, behind: bool, layout: str) -> Any:
    seed_everything(1, verbose=False)
    keep = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=2, save_last=save_last, every_n_train_steps=1
    )
    watch = Watch(folder)
    os.makedirs(folder, exist_ok=True)
    options = CheckpointOptions(async_save=behind)
    trainer = make_trainer(
        {**LAYOUTS[layout], "checkpoint": options}, 2, max_epochs=2, callbacks=[watch, keep], enable_checkpointing=True
    )
    trainer.fit(Tower(), DataLoader(numbered(24), 4))
    return (
        watch.seen,
        os.path.realpath(f"{folder}/last.ckpt"),
        sorted(name for name in os.listdir(folder) if name[0] != "."),
    )


@pytest.mark.parametrize("behind", [False, True], ids=["waiting", "behind"])
def test_removals_and_links(run_distributed: Any, tmp_path: Path, behind: bool) -> None:
    for save_last in (True, "link"):
        folder = str(tmp_path / str(save_last))
        for seen, last, names in run_distributed(removing, folder, save_last, behind, "fsdp", world_size=2):
            for found, dangling in seen:
                assert dangling == [], found
                assert len(found) <= 4 if behind else 3, found
            assert names == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"], names
            assert os.path.basename(last) == ("step=6.ckpt" if save_last == "link" else "last.ckpt")


HOLDER = """
import sys, time
from lightning_pardist.checkpoint import lock
from lightning_pardist.checkpoint.storage import open_storage
lock.acquire(*open_storage(sys.argv[1], None))
print("held", flush=True)
time.sleep(60)
"""


def intruding(folder: str) -> str:
    keep = ModelCheckpoint(folder, "{step}")
    trainer = make_trainer(LAYOUTS["fsdp"], 2, callbacks=[keep], enable_checkpointing=True)
    with mock.patch.object(lock, "GRACE_S", 0.5):
        return attempt(lambda: trainer.fit(Tower(), DataLoader(numbered(24), 4)))


def test_a_second_run_is_refused_while_the_first_lives(run_distributed: Any, tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        texts = run_distributed(intruding, str(tmp_path), world_size=2)
        for text in texts:
            assert "Only one run at a time" in text and f"process {holder.pid}" in text, text
    finally:
        holder.kill()
        holder.wait()
    assert run_distributed(intruding, str(tmp_path), world_size=2) == ["", ""]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=3.ckpt"]


class SaveEpochs(L.Callback):
    """For URLs that ModelCheckpoint takes for folders of the working directory (``file://``)."""

    def __init__(self, url: str) -> None:
        self.url, self.best_model_path = url, ""

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.best_model_path = f"{self.url}/epoch={trainer.current_epoch}.ckpt"
        trainer.save_checkpoint(self.best_model_path)


def remote(url: str, world_size: int, path: str | None) -> Any:
    """Two epochs, or the second only, from the checkpoint after the first."""
    seed_everything(1, verbose=False)
    module, losses = Tower(), Losses()
    by_url = SaveEpochs(url)
    keep = by_url if url.startswith("file") else ModelCheckpoint(url, "{epoch}", save_top_k=-1, save_last=True)
    trainer = make_trainer(
        LAYOUTS["fsdp"] if world_size > 1 else {}, world_size, max_epochs=2, callbacks=[losses, keep],
        enable_checkpointing=keep is not by_url,
    )  # fmt: skip
    trainer.fit(module, DataLoader(numbered(24), 8 // world_size), ckpt_path=path)
    best = Tower()
    trainer.validate(best, DataLoader(numbered(24), 4), ckpt_path=keep.best_model_path, verbose=False)
    return losses.values, weights(module), weights(best)


def both(world_size: int, url: str) -> Any:
    whole = remote(url, world_size, None)
    again = remote(f"{url}-again", world_size, f"{url}/epoch=0.ckpt")
    fs, path = url_to_fs(url)
    manifest = f"{path}/epoch=0.ckpt/manifest.json"
    fs.pipe(manifest, fs.cat(manifest)[:-30])
    return whole, again, attempt(lambda: remote(url, world_size, f"{url}/epoch=0.ckpt"))


def test_remote_folders(run_distributed: Any, tmp_path: Path) -> None:
    for world_size, url in ((1, "memory://bucket/run"), (2, f"file://{tmp_path}/run")):
        for whole, again, refused in run_distributed(both, world_size, url, world_size=world_size):
            losses, final, best = whole
            assert_same_weights(best, final, rtol=0)
            assert again[0] == losses[3:]
            assert_same_weights(again[1], final, rtol=0)
            assert "run/epoch=0.ckpt/manifest.json" in refused, refused
