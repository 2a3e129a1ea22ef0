"""One batch from a dataloader that does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from lightning_pardist.describe import sample_from_loader


class Noisy(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(3) + random.random(), "index": index}


class Stream(IterableDataset[int]):
    reads = 0

    def __iter__(self) -> Iterator[int]:
        Stream.reads += 1
        yield from range(10)


class CountingSampler(SequentialSampler):
    iterations = 0

    def __iter__(self) -> Iterator[int]:
        CountingSampler.iterations += 1
        return super().__iter__()


def test_a_batch_like_the_loaders() -> None:
    sampler = CountingSampler(Noisy())
    loader = DataLoader(Noisy(), batch_size=4, sampler=sampler, num_workers=2)
    states = random.getstate(), torch.get_rng_state()
    batch = sample_from_loader(loader)
    assert batch["x"].shape == (4, 3)
    assert batch["index"].tolist() == [0, 1, 2, 3]
    assert CountingSampler.iterations == 0
    assert loader._iterator is None
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_the_collate_function_and_batch_sampler_are_used() -> None:
    data = TensorDataset(torch.arange(10))
    sampler = BatchSampler(SequentialSampler(data), batch_size=3, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows: [int(row[0]) for row in rows])
    assert sample_from_loader(loader) == [0, 1, 2]


def test_a_short_dataset_gives_a_short_batch() -> None:
    (rows,) = sample_from_loader(DataLoader(TensorDataset(torch.arange(2)), batch_size=8))
    assert rows.tolist() == [0, 1]


def test_a_dataset_of_whole_batches() -> None:
    batch = sample_from_loader(DataLoader(Noisy(), batch_size=None))
    assert batch["x"].shape == (3,)


def test_many_items_at_once() -> None:
    class Bulk(Noisy):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            return [{"x": torch.full((2,), float(index))} for index in indices]

    assert sample_from_loader(DataLoader(Bulk(), batch_size=3))["x"][:, 0].tolist() == [0.0, 1.0, 2.0]


def test_none_where_a_batch_cannot_be_had_untouched() -> None:
    assert sample_from_loader(DataLoader(Stream(), batch_size=2)) is None
    assert Stream.reads == 0
    assert sample_from_loader([torch.ones(2)]) is None
    assert sample_from_loader(None) is None
    assert sample_from_loader(DataLoader(TensorDataset(torch.empty(0, 2)), batch_size=2)) is None
    assert sample_from_loader(DataLoader(TensorDataset(torch.empty(0, 2)), batch_size=None)) is None


def test_a_dataset_that_cannot_be_read_here_is_told() -> None:
    class Elsewhere(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise OSError("only in workers")

    with pytest.warns(UserWarning, match="No sample batch: reading Elsewhere here failed .OSError: only in workers"):
        assert sample_from_loader(DataLoader(Elsewhere(), batch_size=2)) is None
