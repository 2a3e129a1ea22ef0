"""Which rank reads which samples, and that all ranks take the same number of steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DistributedSampler

from lightning_pardist.base.errors import message
from lightning_pardist.base.log import get_logger
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects, maxima
from lightning_pardist.strategies import lightning_data_api
from lightning_pardist.strategies.lightning_data_api import TrainLoaders

log = get_logger(__name__)

RANK_VARIABLE = "PARDIST_DATA_PARALLEL_RANK"
SIZE_VARIABLE = "PARDIST_DATA_PARALLEL_SIZE"

OnUneven = Literal["stop", "raise"]


def publish_data_rank(meshes: Meshes | None) -> None:
    """Puts the data rank and size into the environment, from where workers of data loaders inherit them."""
    os.environ[RANK_VARIABLE] = str(meshes.data_parallel_rank if meshes else 0)
    os.environ[SIZE_VARIABLE] = str(meshes.data_parallel_size if meshes else 1)


def data_parallel_rank_and_size() -> tuple[int, int]:
    """Returns which share of the samples this process reads, and how many shares there are.

    For an IterableDataset that deals out its own samples; valid in the training process and in the workers of data
    loaders, ``(0, 1)`` before a strategy has set up its mesh. Use it in place of RANK and WORLD_SIZE: ranks that share
    one model read the same samples.
    """
    return int(os.environ.get(RANK_VARIABLE, "0")), int(os.environ.get(SIZE_VARIABLE, "1"))


class LoaderAround:
    """A data loader around another one, which has all its attributes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        for name in ("state_dict", "load_state_dict"):  # attributes of its own: Lightning looks for no others
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning seeds workers by it, and would set it where no worker looks.
        object.__setattr__(self._loader if name == "worker_init_fn" else self, name, value)


class AgreedLoader(LoaderAround):
    """A data loader whose ranks agree, batch by batch, that all of them have one more.

    Every step of a sharded model is a collective, so a rank that ends early would leave the others waiting.
    """

    def __init__(self, loader: Any, meshes: Meshes, on_uneven: OnUneven) -> None:
        super().__init__(loader)
        self._meshes = meshes
        self._on_uneven = on_uneven

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        taken = 0
        while True:
            batch = next(batches, _END)
            ended = batch is _END
            some_ended, some_left = maxima([int(ended), int(not ended)], self._meshes)
            if some_ended and some_left:
                self._uneven(taken)
            if some_ended:
                return
            taken += 1
            yield batch

    def _uneven(self, taken: int) -> None:
        if self._on_uneven == "stop":
            log.warning(
                "after %d batches at least one rank has no more data: all ranks end the epoch here, none waits; "
                "samples left on other ranks are not seen in this epoch",
                taken,
            )
            return
        raise _uneven_error(f"after {taken} batches some ranks have one more and some do not")


class SizedAgreedLoader(AgreedLoader):
    """An ``AgreedLoader`` that knows how many batches the shortest rank has. (Lightning looks for ``__len__``.)"""

    def __init__(self, loader: Any, meshes: Meshes, on_uneven: OnUneven, length: int) -> None:
        super().__init__(loader, meshes, on_uneven)
        self._length = length

    def __len__(self) -> int:
        return self._length


_END = object()


def keep_order(loader: Any, loaders: TrainLoaders) -> None:
    """Lets a training loader that reads in order do so on many ranks too.

    Lightning deals training samples with a shuffling sampler whatever the user's loader does; one process would not
    have shuffled. Dealt in order, the ranks' batches together are the batches of one process.
    """
    sampler = dealt_sampler(loader)
    if isinstance(sampler, DistributedSamplerWrapper) and lightning_data_api.draws_by_itself(sampler):
        # Every rank would shuffle with a generator of its own, and no resume could know the order.
        loader.batch_sampler.sampler = DistributedSampler(
            loader.dataset, sampler.num_replicas, sampler.rank, True, sampler.seed, sampler.drop_last
        )
    elif isinstance(sampler, DistributedSampler) and sampler.shuffle and loaders.is_sequential(loader):
        sampler.shuffle = False


def dealt_sampler(loader: Any) -> Any:
    """Returns the sampler whose samples a loader's batches are made of, None if it has none.

    The one in the batch sampler counts: torchdata's loaders get theirs with it, and keep an idle one beside it.
    """
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)


def check_none_empty(loader: Any, meshes: Meshes) -> None:
    """Refuses a loader that is empty on some ranks: Lightning stops those ranks, and the others would wait.

    Raises:
        ValueError: on all ranks.
    """
    lengths = gather_objects(sized_len(loader), meshes)
    if any(lengths) and 0 in lengths:
        raise _empty_error(f"batches by rank: {lengths}")


def check_enough_to_predict(loader: Any, ranks: int) -> None:
    """Refuses to deal fewer samples than ranks for prediction, which repeats none; needs no exchange.

    Lightning's sampler asserts the same, but on the ranks that would get nothing only: the others would wait.

    Raises:
        ValueError: on all ranks.
    """
    sampler = getattr(loader, "sampler", None)
    samples = None if isinstance(sampler, DistributedSampler) else sized_len(sampler)
    if samples is not None and 0 < samples < ranks:
        raise _empty_error(f"{samples} sample(s) to predict for {ranks} data ranks")


def _empty_error(got: str) -> ValueError:
    return ValueError(
        message(
            "Every rank needs at least one batch of every data loader.",
            got=got,
            source="the data loader, its samples dealt over the data ranks",
            change="use fewer ranks, a smaller batch size, or at least as many samples as ranks",
        )
    )


def agree_on_length(loader: Any, meshes: Meshes, *, training: bool) -> Any:
    """Returns the loader itself if all ranks have equally many batches, else one that keeps them in step.

    Every rank must call it for its loaders in the same order.

    Raises:
        ValueError: on all ranks, if evaluation would take different numbers of steps. Dropping samples of an evaluation
            would give another number than one process; dropping the tail of a training epoch only shortens it.
    """
    lengths = gather_objects(sized_len(loader), meshes)
    known = [length for length in lengths if length is not None]
    if len(known) == len(lengths) and len(set(known)) == 1:
        return loader
    if len(known) < len(lengths):
        return AgreedLoader(loader, meshes, "stop" if training else "raise")
    if not training:
        raise _uneven_error(f"batches by rank: {lengths}")
    log.warning(
        "ranks have different numbers of training batches (%s): every epoch ends with the shortest, so that none waits",
        lengths,
    )
    return SizedAgreedLoader(loader, meshes, "stop", min(known))


def _uneven_error(got: str) -> ValueError:
    return ValueError(
        message(
            "All ranks must evaluate equally many batches: each step of a sharded model needs all of them.",
            got=got,
            source="the evaluation data loader on each rank (use_distributed_sampler=False, or an IterableDataset)",
            change="let Trainer(use_distributed_sampler=True) deal the samples, or pad or drop to equal counts",
        )
    )
