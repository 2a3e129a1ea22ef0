"""Steps that look at values: known ones are answered, harmless questions pass, decisions by others end the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.describe import profile_model
from tests.describe.judge import measure
from tests.describe.models import Block, StepModule

Step = Callable[[Any, Any], Any]


class Steps(StepModule):
    """A module whose step is given."""

    def __init__(self, step: Step) -> None:
        super().__init__(nn.Linear(8, 8))
        self.blocks = nn.ModuleList([Block(8, 2) for _ in range(2)])
        self.register_buffer("initialised", torch.tensor(1))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.seen: list[Any] = []
        self.step = step
        self.log = lambda *args, **kwargs: None  # there is no trainer

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, 8, (2, 6))
    labels[0, 3:] = -100
    return {"x": torch.randn(2, 6, 8), "labels": labels, "lengths": torch.tensor([3, 6])}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


# ------------------------------------------------------------------------------------------- answered from the batch


def trims_to_longest(module: Steps, batch: Any) -> torch.Tensor:
    longest = int(batch["lengths"].max())
    return loss_of(module.run(batch["x"][:, : longest - 1]), batch["labels"][:, : longest - 1])


def indexes_by_mask(module: Steps, batch: Any) -> torch.Tensor:
    mask = batch["labels"] != -100
    return F.cross_entropy(module.run(batch["x"])[mask], batch["labels"][mask])


def indexes_by_nonzero(module: Steps, batch: Any) -> torch.Tensor:
    rows, columns = torch.nonzero(batch["labels"] >= 0, as_tuple=True)
    return F.cross_entropy(module.run(batch["x"])[rows, columns], batch["labels"][rows, columns])


def selects(module: Steps, batch: Any) -> torch.Tensor:
    return module.run(batch["x"]).masked_select((batch["labels"] >= 0).unsqueeze(-1)).square().sum()


def decides_by_the_batch(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    if (batch["labels"] == -100).any():
        return loss_of(logits, batch["labels"])
    return logits.sum() * module.net(logits).sum()


def loops_over_lengths(module: Steps, batch: Any) -> torch.Tensor:
    return sum(module.run(row[None, :n]).mean() for row, n in zip(batch["x"], batch["lengths"].tolist()))


def packs_rows(module: Steps, batch: Any) -> torch.Tensor:
    lengths = batch["lengths"].cpu()
    packed = torch.repeat_interleave(torch.arange(2), lengths)
    return module.run(batch["x"][packed]).mean()


def reads_a_buffer(module: Steps, batch: Any) -> torch.Tensor:
    x = module.run(batch["x"])
    if module.initialised.item() == 0:
        x = module.net(x)
    return x.mean() * float(module.scale[1])


def overwrites_what_it_reads(module: Steps, batch: Any) -> torch.Tensor:
    keep = torch.zeros_like(batch["labels"], dtype=torch.bool)
    keep[:, :2] = True
    keep[0, 0] = False
    first = torch.arange(6)
    wanted = int(first[3])
    return module.run(batch["x"][:, :wanted]).mean()


ANSWERED = [
    trims_to_longest, indexes_by_mask, indexes_by_nonzero, selects, decides_by_the_batch, loops_over_lengths,
    packs_rows, reads_a_buffer, overwrites_what_it_reads,
]  # fmt: skip


@pytest.mark.parametrize("step", ANSWERED, ids=lambda step: step.__name__)
def test_values_of_the_batch_are_known(step: Step) -> None:
    module = Steps(step)
    profile = profile_model(module, batch())
    assert profile.fallback_reason is None
    assert profile.assumptions == ()
    real = measure(module, lambda: module.training_step(batch(), 0))
    assert (profile.flops_forward, profile.flops_backward) == (real.forward, real.backward)
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)


# ------------------------------------------------------------------------------------------- asked for, not decided by


def logs_numbers(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    loss = loss_of(logits, batch["labels"])
    value = loss.item()
    module.log("ppl", math.exp(value))
    module.log("mean", (value + 2 * value) / 3 - round(value, 2))
    module.seen.append(value)
    correct = (logits.argmax(-1) == batch["labels"]).sum().item()
    module.log("accuracy", correct / batch["labels"].numel())
    print(f"{value:.3f} {loss:.3f} {loss}")
    return loss * (1 + value * 0)


def floats(module: Steps, batch: Any) -> torch.Tensor:
    loss = loss_of(module.run(batch["x"]), batch["labels"])
    module.seen.append(float(loss))
    return loss


def skips_nan(module: Steps, batch: Any) -> torch.Tensor | None:
    loss = loss_of(module.run(batch["x"]), batch["labels"])
    if torch.isnan(loss) or not torch.isfinite(loss).all() or loss.isinf().any().item():
        return None
    return loss


def may_drop_layers(module: Steps, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for block in module.blocks:
        if torch.rand([]) < 1e-9:
            continue
        x = block(x)
    return x.mean()


@pytest.mark.parametrize("step", [logs_numbers, floats, skips_nan, may_drop_layers], ids=lambda step: step.__name__)
def test_harmless_questions_pass_and_are_told(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    module = Steps(step)
    profile = profile_model(module, batch())
    assert profile.fallback_reason is None
    assert profile.assumptions
    assert all(f"{__file__}:" in assumption for assumption in profile.assumptions)
    real = measure(module, lambda: module.training_step(batch(), 0))
    assert (profile.flops_forward, profile.flops_backward) == (real.forward, real.backward)


# ------------------------------------------------------------------------------------------- nobody can answer


def branches_on_loss(module: Steps, batch: Any) -> torch.Tensor:
    loss = module.run(batch["x"]).square().mean()
    if loss > 3:  # ends here
        loss = loss * 2
    return loss


def branches_on_item(module: Steps, batch: Any) -> torch.Tensor:
    loss = module.run(batch["x"]).square().mean()
    value = loss.item()
    return loss * 2 if value > 3 else loss  # ends here


def slices_by_a_prediction(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    return logits[:, : logits.argmax(-1).max()].sum()  # ends here


def counts_by_a_prediction(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    return sum(logits.sum() for _ in range(logits.argmax(-1).max().item()))  # ends here


def selects_by_a_prediction(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    return logits[logits > 0].sum()  # ends here


def leaves_for_numpy(module: Steps, batch: Any) -> torch.Tensor:
    logits = module.run(batch["x"])
    return logits.sum() * logits.detach().numpy().max()  # ends here


def fails_by_itself(module: Steps, batch: Any) -> torch.Tensor:
    return batch["nothing"]  # ends here


def masks_by_a_random_draw(module: Steps, batch: Any) -> torch.Tensor:
    return module.run(batch["x"])[torch.rand(2) > 0.5].sum()  # ends here


def reads_what_a_draw_overwrote(module: Steps, batch: Any) -> torch.Tensor:
    lengths = batch["lengths"].clone()
    lengths[:1].random_(1, 3)
    return module.run(batch["x"][:, : int(lengths.min())]).sum()  # ends here


UNKNOWN = [
    branches_on_loss, branches_on_item, slices_by_a_prediction, counts_by_a_prediction, selects_by_a_prediction,
    leaves_for_numpy, fails_by_itself, masks_by_a_random_draw, reads_what_a_draw_overwrote,
]  # fmt: skip


@pytest.mark.parametrize("step", UNKNOWN, ids=lambda step: step.__name__)
def test_the_profile_falls_back_and_names_the_line(step: Step) -> None:
    module = Steps(step)
    source, first = inspect.getsourcelines(step)
    line = first + next(number for number, text in enumerate(source) if "# ends here" in text)
    with pytest.warns(UserWarning, match="could not be run on fake tensors") as caught:
        profile = profile_model(module, batch())
    assert profile.source == "module_tree"
    assert profile.fallback_reason is not None
    assert f"{__file__}:{line} (" in profile.fallback_reason
    assert "Lost: costs" in profile.fallback_reason
    assert "\n" not in str(caught[0].message)
    assert [stack.name for stack in profile.stacks] == ["blocks"]
    assert profile.batch_rows == 2
    assert profile.flops_forward == 0
