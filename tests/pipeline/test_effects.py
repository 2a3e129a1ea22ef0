"""What steps leave in attributes: joined as one process has it, or said to stay on the last stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pardist.strategies import step_effects
from tests.resume.common import logged
from tests.strategies.common import Tower, loader, make_trainer

PIPELINE = {"pipeline_parallel_size": 2}


class Leaving(Tower):
    """Appends, extends, replaces, nests and counts; before the blocks and after them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.early: list[int] = []
        self.by_name: dict[str, Any] = {"deep": {"losses": []}}
        self.recent: list[float] = []
        self.word = "none"
        self.newest: Tensor | None = None
        self.odd: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.early.append(100 + batch_idx)  # a number that is not that of the rows, which would be added up
        self.word = f"before {batch_idx}"
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.by_name["deep"]["losses"].append(loss)
        self.by_name.setdefault("new", []).append(len(batch[0]))
        self.by_name.setdefault("made", {}).setdefault("here", []).append(200 + batch_idx)
        self.recent = [*self.recent[-1:], float(batch_idx)]
        self.word = f"after {batch_idx}"
        self.newest = batch[0].sum() * 0 + batch_idx
        if self.what == "unpicklable":
            self.odd.append(lambda: None)
        return loss


def leave(what: str, layout: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    torch.manual_seed(0)
    module = Leaving(what)
    trainer = make_trainer(layout, 1 if layout is None else 2)
    most = step_effects.MOST_BYTES
    step_effects.MOST_BYTES = 4 if what == "large" else most
    try:
        with logged() as lines:
            trainer.fit(module, loader(48, 16))
    finally:
        step_effects.MOST_BYTES = most
    assert module.newest is not None or what != ""
    left = {
        "early": module.early,
        "losses": [float(loss.detach()) for loss in module.by_name["deep"]["losses"]],
        "rows": module.by_name.get("new"),
        "made": module.by_name.get("made"),
        "word": module.word,
        "newest": None if module.newest is None else float(module.newest),
        "odd": len(module.odd),
    }
    return left, lines


def test_attributes_of_one_process(run_distributed: Any, run_single: Any) -> None:
    want, _ = run_single(leave, "", None)
    assert want["early"] == [100, 101, 102] and want["rows"] == [16, 16, 16]
    for left, lines in run_distributed(leave, "", PIPELINE, world_size=2):
        assert left.pop("losses") == pytest.approx(want["losses"], rel=1e-5)
        assert left == {key: value for key, value in want.items() if key != "losses"}
        assert not lines


@pytest.mark.parametrize(
    ("what", "said"), [("unpicklable", "cannot be pickled in by_name"), ("large", "0 MiB in by_name")]
)
def test_what_cannot_be_sent_stays_and_is_told_once(run_distributed: Any, what: str, said: str) -> None:
    (first, quiet), (last, lines) = run_distributed(leave, what, PIPELINE, world_size=2)
    assert len([line for line in lines if said in line]) == 1 and not quiet
    assert len(last["losses"]) > 3 and last["word"] == "after 2"
    assert first["losses"] == []
