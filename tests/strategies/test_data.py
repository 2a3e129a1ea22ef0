"""Which rank reads what, and that no rank is left waiting for one that has no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import lightning_pardist
from tests.strategies.common import FEATURES, HYBRID, LAYOUTS, Tower, loader, make_trainer


class Numbered(Dataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((FEATURES,), index / self.rows)
        return x, torch.tensor(float(index))


class Reader(Tower):
    """Notes the numbers of the samples it was given."""

    def __init__(self) -> None:
        super().__init__(lr=1e-6)
        self.read: dict[str, list[list[int]]] = {"train": [], "val": [], "predict": []}

    def _note(self, stage: str, batch: list[Tensor]) -> None:
        self.read[stage].append([int(number) for number in batch[1]])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self._note("train", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._note("val", batch)
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self._note("predict", batch)
        return {"number": batch[1], "name": [f"sample {int(n)}" for n in batch[1]], "out": self(batch[0])}


def read_all(layout: dict[str, Any], world_size: int, shuffle: bool) -> Any:
    module = Reader()
    trainer = make_trainer(layout, world_size, num_sanity_val_steps=0)
    train = DataLoader(Numbered(48), batch_size=4, shuffle=shuffle)
    trainer.fit(module, train, DataLoader(Numbered(16), batch_size=2))
    return module.read


@pytest.mark.parametrize(("world_size", "layout"), [(2, LAYOUTS["ddp"]), (2, LAYOUTS["fsdp"]), (4, HYBRID)])
def test_every_sample_goes_to_one_rank_and_order_is_kept(
    run_distributed: Any, world_size: int, layout: dict[str, Any]
) -> None:
    ordered = run_distributed(read_all, layout, world_size, False, world_size=world_size)
    for step in range(len(ordered[0]["train"])):
        together = sorted(number for read in ordered for number in read["train"][step])
        size = 4 * world_size
        assert together == list(range(step * size, (step + 1) * size)), "not the batch one process would see"
    assert sorted(n for read in ordered for batch in read["val"] for n in batch) == list(range(16))
    if world_size == 2:
        shuffled = run_distributed(read_all, layout, world_size, True, world_size=world_size)
        numbers = [n for read in shuffled for batch in read["train"] for n in batch]
        assert sorted(numbers) == list(range(48))
        assert shuffled[0]["train"] != ordered[0]["train"]


def read_own_sampler(layout: dict[str, Any], world_size: int) -> Any:
    module = Reader()
    trainer = make_trainer(layout, world_size, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Numbered(8), batch_size=4))
    return module.read["train"]


def test_use_distributed_sampler_false_is_honoured(run_distributed: Any) -> None:
    results = run_distributed(read_own_sampler, LAYOUTS["fsdp"], 2, world_size=2)
    assert results == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


class Stream(IterableDataset):
    """Deals its own samples by the documented data rank; rank 0 may have more."""

    def __init__(self, rows: int, extra: int = 0) -> None:
        self.rows, self.extra = rows, extra

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, size = lightning_pardist.data_parallel_rank_and_size()
        rows = self.rows + (self.extra if rank == 0 else 0) * size
        for index in range(rank, rows, size):
            yield torch.full((FEATURES,), index / 100), torch.tensor(float(index))


def read_stream(layout: dict[str, Any], world_size: int, extra: int, workers: int) -> Any:
    module = Reader()
    trainer = make_trainer(layout, world_size, max_epochs=2)
    trainer.fit(module, DataLoader(Stream(16, extra), batch_size=2, num_workers=workers))
    return module.read["train"], trainer.global_step


@pytest.mark.parametrize("workers", [0, 1])
def test_iterable_dataset_deals_by_the_data_rank(run_distributed: Any, workers: int) -> None:
    results = run_distributed(read_stream, LAYOUTS["fsdp"], 2, 0, workers, world_size=2)
    assert sorted(n for read, _ in results for batch in read for n in batch) == sorted(list(range(16)) * 2)


def test_streams_of_unequal_length_end_together(run_distributed: Any) -> None:
    for layout in (LAYOUTS["ddp"], LAYOUTS["fsdp"]):
        results = run_distributed(read_stream, layout, 2, 5, 0, world_size=2)
        assert [steps for _, steps in results] == [8, 8]
        assert len(results[0][0]) == len(results[1][0])


def uneven_loaders(layout: dict[str, Any], stage: str) -> Any:
    rank, _ = 0, 1
    import torch.distributed as dist

    rank = dist.get_rank()
    module = Reader()
    trainer = make_trainer(layout, 2, use_distributed_sampler=False, num_sanity_val_steps=0)
    data = DataLoader(Numbered(8 + 4 * rank), batch_size=2)
    if stage == "fit":
        trainer.fit(module, data)
        return trainer.global_step
    trainer.validate(module, data, verbose=False)
    return None


def test_unequal_training_loaders_end_with_the_shortest(run_distributed: Any) -> None:
    assert run_distributed(uneven_loaders, LAYOUTS["fsdp"], "fit", world_size=2) == [4, 4]


def test_unequal_evaluation_loaders_are_refused_together(run_distributed: Any) -> None:
    errors = run_distributed.errors(uneven_loaders, LAYOUTS["fsdp"], "validate", world_size=2)
    assert all(isinstance(error, ValueError) and "batches by rank: [4, 6]" in str(error) for error in errors)


def predict(layout: dict[str, Any], world_size: int, rows: int, gather: bool) -> Any:
    torch.manual_seed(0)
    module = Reader()
    trainer = make_trainer({**layout, "gather_predictions": gather}, world_size)
    return trainer.predict(module, DataLoader(Numbered(rows), batch_size=2)), module.read["predict"]


@pytest.mark.parametrize(("world_size", "layout"), [(2, LAYOUTS["ddp"]), (2, LAYOUTS["fsdp"]), (4, HYBRID)])
def test_predict_gives_each_sample_once(run_distributed: Any, world_size: int, layout: dict[str, Any]) -> None:
    rows = 9  # deals unevenly: some ranks have one batch less
    own = run_distributed(predict, layout, world_size, rows, False, world_size=world_size)
    numbers = [int(n) for predictions, _ in own for output in predictions for n in output["number"]]
    assert sorted(numbers) == list(range(rows))
    for predictions, _ in run_distributed(predict, layout, world_size, rows, True, world_size=world_size):
        assert [len(output["name"]) for output in predictions] == [2, 2, 2, 2, 1]
        assert [n for output in predictions for n in output["name"]] == [f"sample {n}" for n in range(rows)]
        assert [int(n) for output in predictions for n in output["number"]] == list(range(rows))


class Ungatherable(Tower):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).mean()


def predict_ungatherable() -> None:
    make_trainer({"gather_predictions": True}, 2).predict(Ungatherable(), loader(8, 2))


def test_outputs_that_are_not_by_sample_cannot_be_gathered(run_distributed: Any) -> None:
    errors = run_distributed.errors(predict_ungatherable, world_size=2)
    assert all(isinstance(error, ValueError) and "one entry per sample" in str(error) for error in errors)


def random_sampler(layout: dict[str, Any]) -> Any:
    module = Reader()
    dataset = Numbered(16)
    trainer = make_trainer(layout, 2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset)))
    return [n for batch in module.read["train"] for n in batch]


def test_random_sampler_is_dealt_without_repeats(run_distributed: Any) -> None:
    results = run_distributed(random_sampler, LAYOUTS["fsdp"], world_size=2)
    assert sorted(results[0] + results[1]) == list(range(16))
