"""One batch to describe the module with, found without disturbing the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_pardist.describe import sample_from_loader
from lightning_pardist.strategies.lightning_data_api import TrainLoaders, evaluation_source, is_sequential


@dataclass(frozen=True)
class Sample:
    """A batch and the method it is meant for."""

    batch: Any
    entry: Literal["training_step", "forward"]


def find_sample(module: LightningModule, loaders: TrainLoaders | None, given: Any) -> Sample | None:
    """Returns a batch of the training data, else the module's ``example_input_array``, else None.

    Args:
        module: the user's module.
        loaders: the training data loaders, None outside fit; their samplers and workers are not touched.
        given: the strategy's ``sample_batch``, which comes first.
    """
    if given is not None:
        return Sample(given, "training_step")
    batch = None if loaders is None else _from_loaders(loaders.peek())
    if batch is not None:
        return Sample(batch, "training_step")
    if module.example_input_array is not None:
        return Sample(module.example_input_array, "forward")
    return None


def sample_or_evaluated(module: LightningModule, sample: Sample | None) -> Sample | None:
    """Returns the sample, or a batch of the loop that is about to run: some axes need one before they are applied."""
    trainer = module.trainer
    if (sample is not None and sample.entry == "training_step") or trainer.training:
        return sample
    loaders = evaluation_source(trainer)
    first = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
    batch = None if first is None else sample_from_loader(first)
    return sample if batch is None else Sample(batch, "training_step")


def _from_loaders(loaders: Any) -> Any:
    """Mirrors the structure of Lightning's combined loaders: a batch has the shape of the loaders' container."""
    if loaders is None:
        return None
    if isinstance(loaders, CombinedLoader):
        return _from_loaders(loaders.flattened[:1][0] if is_sequential(loaders) else loaders.iterables)
    if isinstance(loaders, dict):
        parts = {key: _from_loaders(loader) for key, loader in loaders.items()}
        return None if any(part is None for part in parts.values()) else parts
    if isinstance(loaders, (list, tuple)):
        batches = [_from_loaders(loader) for loader in loaders]
        return None if any(batch is None for batch in batches) else type(loaders)(batches)
    return sample_from_loader(loaders)
