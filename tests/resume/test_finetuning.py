"""A run that unfreezes its backbone is resumed past the epoch in which it did, and before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.resume.common import HYBRID, LAYOUTS, Losses, Tower, logged, make_trainer, numbered, weights
from tests.strategies.common import assert_same_weights


class Tuned(Tower):
    """A head over a backbone; the optimizer is given what is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.inp, *self.blocks, nn.Dropout(0.2))
        del self.inp, self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.backbone(x)).squeeze(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.02, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def tune(
    layout: dict[str, Any] | None, world_size: int, folder: str, resume: str | None, dropout: bool
) -> tuple[list[float], dict[str, Tensor], list[Any], list[str]]:
    """Four epochs, the backbone trains from the third on; a checkpoint after each."""
    seed_everything(7 if resume is None else 8, verbose=False)
    module, losses = Tuned(), Losses()
    if not dropout:
        module.backbone[-1] = nn.Identity()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)
    callbacks: list[Any] = [losses, finetuning]
    if resume is None:
        callbacks.append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    trainer = make_trainer(layout, world_size, max_epochs=4, callbacks=callbacks, enable_checkpointing=resume is None)
    sizes = layout or {}
    copies = sizes.get("pipeline_parallel_size", 1) * sizes.get("tensor_parallel_size", 1)
    with logged() as lines:
        trainer.fit(module, DataLoader(numbered(32), 16 * copies // world_size), ckpt_path=resume)
    groups = [(len(group["params"]), group["lr"]) for group in trainer.optimizers[0].param_groups]
    return losses.values, weights(module), groups, lines


TWO = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
MODEL_PARALLEL = {
    "tensor": (2, {"tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "both": (4, TWO),
}


@pytest.mark.parametrize("target", MODEL_PARALLEL)
def test_tensor_and_pipeline_layouts(run_distributed: Any, run_single: Any, tmp_path: Path, target: str) -> None:
    """Unfrozen in the run, and resumed before and after, from checkpoints of the layout and of plain Lightning."""
    plain, own = str(tmp_path / "plain"), str(tmp_path / "own")
    whole, final, groups, _ = run_single(tune, None, 1, plain, None, False)
    world_size, layout = MODEL_PARALLEL[target]

    def check(skipped: int, folder: str, resume: str | None) -> None:
        for losses, ours, counts, _ in run_distributed(
            tune, layout, world_size, folder, resume, False, world_size=world_size
        ):
            assert losses == pytest.approx(whole[skipped:], rel=1e-5)
            assert [count for count, _ in counts] == [count for count, _ in groups]
            held = {name: value for name, value in ours.items() if not value.isnan().all()}
            assert len(held) > 4
            assert_same_weights(held, {name: final[name] for name in held})

    check(0, own, None)
    for source in (own, plain):
        for epoch in (0, 2):
            check(2 * (epoch + 1), "", f"{source}/epoch={epoch}.ckpt")


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_resumed_around_the_unfreezing(run_distributed: Any, tmp_path: Path, epoch: int) -> None:
    fsdp, ddp = LAYOUTS["fsdp"], LAYOUTS["ddp"]
    sources = {"fsdp": (fsdp, 2), "ddp": (ddp, 2)}
    targets = {"fsdp": (fsdp, 2), "ddp": (ddp, 2), "hybrid": (HYBRID, 4), "one": ({}, 1)}
    for source, (layout, world_size) in sources.items():
        folder = str(tmp_path / source)
        whole = run_distributed(tune, layout, world_size, folder, None, source == "fsdp", world_size=world_size)[0]
        assert len(whole[2]) == 2
        for target, (other, size) in targets.items():
            if source == "fsdp" and target != "fsdp":
                continue  # dropout draws other numbers elsewhere
            losses, final, groups, lines = run_distributed(
                tune, other, size, folder, f"{folder}/epoch={epoch}.ckpt", source == "fsdp", world_size=size
            )[0]
            assert losses == pytest.approx(whole[0][2 * (epoch + 1) :], rel=1e-6), (source, target)
            assert groups == [(count, pytest.approx(rate)) for count, rate in whole[2]], (source, target)
            assert_same_weights(final, whole[1])
            if source == target:
                assert losses == whole[0][2 * (epoch + 1) :]
                assert not lines, lines
