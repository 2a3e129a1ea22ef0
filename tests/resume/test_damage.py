"""A damaged checkpoint is refused by name on all ranks; "last" goes on with the one before, and says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.resume.common import LAYOUTS, Losses, Tower, attempt, logged, make_trainer, numbered


def fit(folder: str, path: str | None, epochs: int, **options: Any) -> Any:
    seed_everything(1, verbose=False)
    losses = Losses()
    callback = ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)
    trainer = make_trainer(
        LAYOUTS["fsdp"], 2, max_epochs=epochs, callbacks=[losses, callback], enable_checkpointing=True
    )
    with logged() as lines:
        trainer.fit(Tower(), DataLoader(numbered(16), 4), ckpt_path=path)
    return losses.values, lines, trainer.global_step


def prepared(folder: str) -> Any:
    return fit(folder, None, 3, save_last=True)


def refused(folders: list[str]) -> list[str]:
    return [attempt(lambda f=folder: fit(f, f"{f}/last.ckpt", 4)) for folder in folders]


def fallen_back(folders: list[str]) -> list[Any]:
    return [fit(folder, "last", 3, save_last=True) for folder in folders]


def test_damage_is_refused_and_last_falls_back(run_distributed: Any, tmp_path: Path) -> None:
    (tmp_path / "sound").mkdir()
    losses, _, _ = run_distributed(prepared, str(tmp_path / "sound"), world_size=2)[0]
    damages: dict[str, tuple[Callable[[Path], Any], str]] = {
        "flipped": (lambda last: flip(last / "__1_0.distcp"), "__1_0.distcp differs"),
        "missing": (lambda last: (last / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        "truncated": (lambda last: cut(last / "manifest.json"), "manifest.json"),
        "no manifest": (lambda last: (last / "manifest.json").unlink(), "manifest.json"),
        "objects": (lambda last: flip(last / "trainer.pt"), "trainer.pt differs"),
    }
    folders = []
    for name, (damage, _) in damages.items():
        shutil.copytree(tmp_path / "sound", tmp_path / name)
        (tmp_path / name / ".pardist.lock").unlink(missing_ok=True)
        damage(tmp_path / name / "last.ckpt")
        # The two steps before are complete; the newest of all is a copy of the damaged one's moment.
        shutil.rmtree(tmp_path / name / "step=6.ckpt")
        folders.append(str(tmp_path / name))
    for rank in run_distributed(refused, folders, world_size=2):
        for text, (name, (_, expected)) in zip(rank, damages.items(), strict=True):
            assert expected in text and f"{name}/last.ckpt" in text, text
    for rank in run_distributed(fallen_back, folders, world_size=2):
        for (again, lines, steps), name in zip(rank, damages, strict=True):
            assert again == losses[4:] and steps == 6, name
            assert any("goes on with the complete checkpoint before it" in line for line in lines), lines
            assert any(f"{name}/step=4.ckpt" in line for line in lines), lines


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def lost_all(folder: str) -> str:
    return attempt(lambda: fit(folder, "last", 3))


def test_nothing_whole_is_left(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(prepared, str(tmp_path), world_size=2)
    for path in tmp_path.glob("*.ckpt"):
        cut(path / "manifest.json")
    texts = run_distributed(lost_all, str(tmp_path), world_size=2)
    assert texts[0] == texts[1] and "last.ckpt/manifest.json" in texts[0], texts
