"""Every private name of Lightning around data loaders and samplers that this package relies on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import (
    DistributedSamplerWrapper,
)
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import SequentialSampler


def evaluation_source(trainer: Trainer) -> Any:
    """Returns the loaders of the loop that is about to validate, test or predict, as the user builds them."""
    loop = {TrainerFn.VALIDATING: trainer.validate_loop, TrainerFn.TESTING: trainer.test_loop}.get(
        trainer.state.fn,  # type: ignore[arg-type]
        trainer.predict_loop,
    )
    source = loop._data_source
    return source.dataloader() if source.is_defined() else None


def before_dataloader(trainer: Trainer, fn: Callable[[Any], None]) -> Callable[[], None]:
    """Calls ``fn`` with each data loader of the user's before Lightning deals its samples; returns what ends this."""
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def with_fn(dataloader: object, *args: Any, **kwargs: Any) -> object:
        fn(dataloader)
        return prepare(dataloader, *args, **kwargs)

    connector._prepare_dataloader = with_fn  # type: ignore[method-assign]
    return lambda: vars(connector).pop("_prepare_dataloader", None)


def deals_samples(trainer: Trainer) -> bool:
    """Returns True if Lightning gives data loaders a distributed sampler."""
    return trainer._accelerator_connector.use_distributed_sampler


class TrainLoaders:
    """The user's training data loaders as the user built them, before Lightning rebuilds them with its samplers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._source = trainer.fit_loop._data_source
        self._ask = self._source.dataloader
        self._early: Any = None
        self._sequential: list[Any] = []
        self._source.dataloader = self._answer  # type: ignore[method-assign]

    def peek(self) -> Any:
        """Returns the loaders before the fit loop asks for them; the user's hook runs once all the same."""
        if self._trainer.fit_loop._combined_loader is not None or not self._source.is_defined():
            return None
        if self._early is None:
            self._early = self._ask()
            self._note(self._early)
        return self._early

    def flattened(self) -> list[Any]:
        """Returns the loaders one by one: those that run, or those that will."""
        running = self._trainer.fit_loop._combined_loader
        if running is not None:
            return list(running.flattened)
        loaders = self.peek()
        if loaders is None:
            return []
        return list((loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)).flattened)

    def is_sequential(self, loader: Any) -> bool:
        """Returns True if the user's loader over the same dataset reads it in order."""
        return any(getattr(loader, "dataset", None) is dataset for dataset in self._sequential)

    def uninstall(self) -> None:
        """Gives the source its own method back."""
        vars(self._source).pop("dataloader", None)

    def _answer(self) -> Any:
        loaders, self._early = self._early, None
        if loaders is None:
            loaders = self._ask()
            self._note(loaders)
        return loaders

    def _note(self, loaders: Any) -> None:
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
        for loader in combined.flattened:
            if isinstance(getattr(loader, "sampler", None), SequentialSampler):
                self._sequential.append(loader.dataset)


def is_sequential(loader: CombinedLoader) -> bool:
    """Returns whether batches come from one loader after the other, not from all at once."""
    return loader._mode == "sequential"


def prepare_training_data_again(trainer: Trainer) -> None:
    """Has the fit loop prepare its loaders when it starts, if something had it do so before."""
    trainer.fit_loop._combined_loader = None


@contextmanager
def transfer_hooks_of_data_module(module: LightningModule) -> Iterator[None]:
    """Lets the module answer with its data module's transfer hooks, where Lightning would call those instead."""
    connector = module.trainer._data_connector if module._trainer is not None else None
    selector = None if connector is None else connector._datahook_selector
    names = ("on_before_batch_transfer", "on_after_batch_transfer")
    chosen = {} if selector is None else {name: selector.get_instance(name) for name in names}
    lent = {name: _as_function(getattr(owner, name)) for name, owner in chosen.items() if owner is not module}
    vars(module).update(lent)
    try:
        yield
    finally:
        for name in lent:
            vars(module).pop(name)


def _as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    # A copy of the module copies bound methods with their object, here a data module with its dataset.
    return lambda *args: method(*args)


def predicted_indices(trainer: Trainer) -> list[list[list[int]]]:
    """Returns, by loader and batch, the dataset indices that the predict loop has drawn on this rank.

    Empty for a loader that does not tell (an iterable dataset).
    """
    loader = trainer.predict_loop._combined_loader
    assert loader is not None
    return [list(getattr(getattr(dl, "batch_sampler", None), "seen_batch_indices", [])) for dl in loader.flattened]


def batches_read_ahead(trainer: Trainer) -> int:
    """Returns how many training batches have been fetched that no step has had yet."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def draws_by_itself(wrapper: DistributedSamplerWrapper) -> bool:
    """Returns True if Lightning deals out what torchdata's shuffling sampler draws; it knows torch's own only."""
    sampler: Any = wrapper.dataset._sampler  # type: ignore[attr-defined]
    is_torchdata = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    return is_torchdata and not sampler.replacement and len(sampler) == len(sampler.data_source)


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tells the samplers of a loader which epoch they are in."""
    _set_sampler_epoch(loader, epoch)


def seed_workers_by(dataloader: Any, rank: int) -> None:
    """Lets Lightning's seeding of loader workers go by the data rank, so that ranks that share samples augment alike.

    Lightning itself goes by the global rank, unless a loader has a ``worker_init_fn``.
    """
    asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    if asked and hasattr(dataloader, "worker_init_fn") and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
