"""Resume in the middle of an epoch: every sample is seen once, on the same layout and on others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pardist.strategies.batches import data_parallel_rank_and_size
from tests.resume.common import LAYOUTS, Seeing, Stop, Stopped, logged, make_trainer, numbered

ROWS = 48


def run(world_size: int, loader: Any, *, resume: str | None = None, save: str | None = None, stop: int = -1) -> Any:
    """Trains two epochs, or until ``stop`` batches are done; saves at every step if asked."""
    seed_everything(5, verbose=False)
    module, callbacks = Seeing(), [Stop(stop)]
    if save is not None:
        callbacks.append(ModelCheckpoint(save, "at", every_n_train_steps=1, enable_version_counter=False))
    trainer = make_trainer(
        LAYOUTS["ddp"], world_size, max_epochs=2, callbacks=callbacks, enable_checkpointing=save is not None
    )
    with logged() as lines, contextlib.suppress(Stopped):
        trainer.fit(module, loader, ckpt_path=resume)
    return module.seen, lines


def stateful(batch_size: int, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(numbered(ROWS), batch_size=batch_size, **options)


def first_part(folder: str, shuffle: bool, workers: int) -> Any:
    """Two ranks, four samples each: three of the second epoch's six batches are done."""
    return run(2, stateful(4, shuffle=shuffle, num_workers=workers), save=folder, stop=9)


def second_parts(world_size: int, parts: dict[str, int], folder: str, shuffle: bool, workers: int) -> Any:
    return {
        name: run(world_size, stateful(batch_size, shuffle=shuffle, num_workers=workers), resume=f"{folder}/at.ckpt")
        for name, batch_size in parts.items()
    }


def samples(results: list[Any], start: int = 0) -> list[int]:
    return [row for seen, _ in results for batch in seen[start:] for row in batch]


PARTS: dict[int, dict[str, int]] = {
    2: {"same": 4, "larger batch": 8, "batch that does not meet": 5},
    4: {"same global batch": 2, "larger": 4},
    1: {"same global batch": 8, "smaller": 3},
}


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_every_sample_is_seen_once(run_distributed: Any, tmp_path: Path, shuffle: bool) -> None:
    before = run_distributed(first_part, str(tmp_path), shuffle, 0, world_size=2)
    seen = samples(before, start=6)
    assert len(seen) == 24
    for world_size, parts in PARTS.items():
        if shuffle and world_size == 1:
            continue  # a single rank keeps the user's own shuffling: below
        results = run_distributed(second_parts, world_size, parts, str(tmp_path), shuffle, 0, world_size=world_size)
        for name in parts:
            after = [result[name] for result in results]
            assert sorted(seen + samples(after)) == list(range(ROWS)), (world_size, name)
            lines = after[0][1]
            assert not any("seen twice" in line or "order" in line for line in lines), lines


def test_workers_skip_the_right_epochs_order(run_distributed: Any, tmp_path: Path) -> None:
    before = run_distributed(first_part, str(tmp_path), True, 1, world_size=2)
    results = run_distributed(second_parts, 2, {"same": 4, "other": 8}, str(tmp_path), True, 1, world_size=2)
    for name in ("same", "other"):
        after = [result[name] for result in results]
        assert sorted(samples(before, start=6) + samples(after)) == list(range(ROWS)), name


def chain(world_size: int, folder: str, resume: str | None, stop: int, batch_size: int) -> Any:
    return run(world_size, stateful(batch_size), resume=resume, save=folder, stop=stop)


def test_an_epoch_may_move_more_than_once(run_distributed: Any, tmp_path: Path) -> None:
    """Over four layouts, one of them twice, each of which takes a part of one epoch."""
    names = [str(tmp_path / name) for name in "abcde"]
    seen: list[int] = []
    resume = None
    for folder, (world_size, batch_size, stop) in zip(
        names, [(2, 2, 3), (4, 1, 2), (4, 1, 2), (1, 6, 1), (2, 4, -1)], strict=True
    ):
        results = run_distributed(chain, world_size, folder, resume, stop, batch_size, world_size=world_size)
        if stop == -1:
            results = [(batches[: -(ROWS // 8)], lines) for batches, lines in results]  # without the second epoch
        seen += samples(results)
        resume = f"{folder}/at.ckpt"
    assert sorted(seen) == list(range(ROWS))


class Stream(IterableDataset):
    """Deals its own samples, keeps its place, and knows no length."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        rank, size = data_parallel_rank_and_size()
        data = numbered(ROWS)
        while self.next * size + rank < ROWS:
            self.next += 1
            yield data[(self.next - 1) * size + rank]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def stream(world_size: int, folder: str, resume: bool, batch_size: int) -> Any:
    loader = StatefulDataLoader(Stream(), batch_size=batch_size)
    return run(
        world_size, loader, save=None if resume else folder, resume=f"{folder}/at.ckpt" if resume else None,
        stop=-1 if resume else 3,
    )  # fmt: skip


def test_streams_go_on_at_the_next_sample(run_distributed: Any, tmp_path: Path) -> None:
    before = run_distributed(stream, 2, str(tmp_path), False, 4, world_size=2)
    for world_size, batch_size in ((2, 4), (4, 2), (1, 8)):
        after = run_distributed(stream, world_size, str(tmp_path), True, batch_size, world_size=world_size)
        rest = (ROWS - 24) // (world_size * batch_size)
        first_epoch = [(seen[:rest], lines) for seen, lines in after]
        assert sorted(samples(before) + samples(first_epoch)) == list(range(ROWS)), world_size


def warned(folder: str) -> Any:
    return run(1, stateful(8, shuffle=True), resume=f"{folder}/at.ckpt")


def test_what_cannot_be_exact_is_said(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(first_part, str(tmp_path), True, 0, world_size=2)
    _, lines = run_distributed(warned, str(tmp_path), world_size=1)[0]
    assert any("order is another on this layout" in line for line in lines), lines
