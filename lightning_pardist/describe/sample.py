"""One batch of a dataloader, made without touching the dataloader."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset


@contextmanager
def keep_rng_state() -> Iterator[None]:
    """Puts back the random state of python, numpy and torch (CPU, and CUDA where in use) at the end."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def sample_from_loader(loader: object) -> Any | None:
    """Returns one batch as the loader would collate it, or None if that cannot be known without iterating it.

    The first samples of the dataset are collated: as many as a batch has. The loader's sampler and workers are not
    started, and the random state is put back. None for anything but a ``DataLoader`` over a map-style dataset (an
    iterable dataset may be a stream that can be read once), for an empty dataset, and, with a warning, for one whose
    samples cannot be had in this process.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    dataset = loader.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    try:
        with keep_rng_state():
            return _collated(loader, dataset)
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"No sample batch: reading {type(dataset).__name__} here failed ({what})", stacklevel=2)
        return None


def _collated(loader: DataLoader[Any], dataset: Any) -> Any | None:
    if not len(dataset):
        return None
    size = _batch_size(loader)
    if size is None:  # batching is switched off: the dataset gives whole batches
        return loader.collate_fn(dataset[0])
    return loader.collate_fn(_fetch(dataset, range(min(size, len(dataset)))))


def _fetch(dataset: Any, indices: Sequence[int]) -> Any:
    if getattr(dataset, "__getitems__", None) is not None:
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None:
        return loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None)
