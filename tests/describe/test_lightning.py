"""What a LightningModule asks of Lightning in its step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics import Accuracy, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassF1Score

from lightning_pardist.describe import profile_model
from tests.describe.models import GAN, GPT, StepModule, gpt_batch


def test_manual_optimization_is_described() -> None:
    profile = profile_model(GAN(), torch.randn(4, 16))
    assert profile.fallback_reason is None
    assert profile.assumptions != ()
    assert profile.unused_parameters == ()
    assert all(parameter.requires_grad for parameter in profile.parameters)
    rows, g, d = 4, 8 * 32 + 32 * 16, 16 * 32 + 32
    assert profile.flops_forward == 2 * rows * (2 * g + 3 * d)
    # The toggles leave: generator loss through both nets, discriminator loss through one.
    generator = 2 * g - 8 * 32 + d
    discriminator = 2 * (2 * d - 16 * 32)
    assert profile.flops_backward == 2 * rows * (generator + discriminator)


def test_a_step_that_leaves_parameters_frozen() -> None:
    class Leaving(StepModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).sum()
            self.net.requires_grad_(False)
            return loss

    module = Leaving(nn.Linear(4, 4))
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert all(parameter.requires_grad for parameter in profile.parameters)


class Asking(StepModule):
    """Uses the services of the trainer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.child = GPT()  # a LightningModule inside
        self.trained = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        assert self.trainer.global_step == self.global_step
        if self.trainer.is_global_zero and self.trainer.world_size == 1:
            self.print("hello")
        self.logger.experiment.add_scalar("x", 1.0)
        gathered = self.all_gather(batch)
        loss = self.net(gathered).sum() * (1 + self.current_epoch) + self.child.wte.weight.sum()
        self.child.log("inner", loss)
        self.trainer.should_stop = True
        assert self.optimizers().param_groups[0]["lr"] == 0.1
        assert self.lr_schedulers() is None
        return {"loss": loss, "rows": len(batch)}


def test_services_without_a_trainer() -> None:
    profile = profile_model(Asking(), torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert profile.flops_forward == 2 * 2 * 4 * 4


def test_services_of_a_real_trainer_are_read_and_left_alone(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = Asking()
    trainer = L.Trainer(accelerator="cpu", logger=CSVLogger(tmp_path), enable_progress_bar=False)
    module.trainer = trainer
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert not trainer.should_stop
    assert module.trainer is trainer
    assert list(tmp_path.iterdir()) == []
    assert "hello" not in capsys.readouterr().out


def test_acting_on_the_real_trainer_ends_the_run() -> None:
    class Saving(StepModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.trainer.save_checkpoint("never.ckpt")
            return self.net(batch).sum()

    module = Saving(nn.Linear(4, 4))
    module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.warns(UserWarning, match="save_checkpoint"):
        assert profile_model(module, torch.randn(2, 4)).source == "module_tree"


class Measured(StepModule):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3))
        self.accuracy = Accuracy(task="multiclass", num_classes=3)
        self.mean = MeanMetric()
        self.collection = MetricCollection(
            {"f1": MulticlassF1Score(3), "a": Accuracy(task="multiclass", num_classes=3)}
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("accuracy", self.accuracy(logits, y))
        self.mean.update(loss)
        self.log("mean", self.mean)
        self.log_dict(self.collection(logits.softmax(-1), y))
        self.log("now", self.mean.compute().item())
        return loss


def test_metrics_in_the_step() -> None:
    module = Measured()
    profile = profile_model(module, (torch.randn(6, 4), torch.randint(0, 3, (6,))))
    assert profile.fallback_reason is None
    assert profile.flops_forward == 2 * 6 * 4 * 3
    assert profile.flops_backward == 2 * 6 * 4 * 3
    assert not module.accuracy.update_called
    assert not module.mean.update_called


def test_hooks_around_the_move_to_the_device_are_run() -> None:
    class Doubling(StepModule):
        def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            return torch.cat([batch, batch])

        def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
            return batch + torch.randn_like(batch)

    assert profile_model(Doubling(nn.Linear(4, 4)), torch.randn(2, 4)).flops_forward == 2 * 4 * 4 * 4


def test_steps_of_every_signature() -> None:
    class Bare(StepModule):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).sum()

    class Starred(StepModule):
        def training_step(self, *args: Any) -> torch.Tensor:
            assert args[1] == 0
            return self.net(args[0]).sum()

    for module in (Bare(nn.Linear(4, 4)), Starred(nn.Linear(4, 4))):
        assert profile_model(module, torch.randn(2, 4)).fallback_reason is None


def test_a_step_without_a_loss_has_no_backward() -> None:
    class Skipping(StepModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.net(batch)

    profile = profile_model(Skipping(nn.Linear(4, 4)), torch.randn(2, 4))
    assert (profile.flops_forward, profile.flops_backward) == (2 * 2 * 4 * 4, 0)


def test_a_compiled_submodule_runs_uncompiled() -> None:
    module = StepModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    module.net = torch.compile(module.net)
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert profile.flops_forward == 2 * (2 * 2 * 4 * 4)


def test_the_profile_of_a_gpt_takes_little_time() -> None:
    assert profile_model(GPT(), gpt_batch()).seconds < 5
