"""Ranks with fewer batches than others, in loops without gradients: they join the others' steps and count nothing.

Evaluation and prediction deal every sample once, so some ranks can have one batch less. Each step of a sharded model is
a collective: such a rank runs its last batch once more, keeps silent, and leaves its metrics as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from lightning_pardist.base.errors import message
from lightning_pardist.mesh import Meshes
from lightning_pardist.run.agree import gather_objects


class Turns:
    """How many steps of others each rank still has to join, by loader."""

    def __init__(self) -> None:
        self._seen = 0
        self._ends: dict[int, int] = {}

    def start(self, batches: Sequence[int | float], meshes: Meshes | None) -> None:
        """Exchanges how many batches every rank has per loader.

        Args:
            batches: this rank's counts, by loader; infinite counts are kept in step by their loader.
            meshes: None if steps need no other rank.

        Raises:
            ValueError: on all ranks, if some rank has nothing for a loader that others have batches of.
        """
        self._seen, self._ends = 0, {}
        if meshes is None:
            return
        everybody = gather_objects(list(batches), meshes)
        end = 0
        for loader, mine in enumerate(batches):
            counts = [other[loader] for other in everybody]
            if float("inf") in counts:
                return
            if min(counts) == 0 < max(counts):
                raise ValueError(
                    message(
                        "Every rank needs at least one batch, for each step of a sharded model needs all ranks.",
                        got=f"batches by rank: {counts} (loader {loader})",
                        source="the data loader, dealt over the data ranks",
                        change="use fewer ranks, a smaller batch size, or more samples than ranks",
                    )
                )
            end += int(mine)
            self._ends[end] = int(max(counts) - mine)

    def left_to_join(self) -> int:
        """Returns how many steps of others this rank must join after the batch it has just done."""
        self._seen += 1
        return self._ends.get(self._seen, 0)


def has_own_dealing(loader: Any) -> bool:
    """Returns True for a loader whose samples the user deals: by a sampler, or inside an iterable dataset."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler) or has_iterable_dataset(loader)


def deal_each_once(loader: Any) -> None:
    """Lets a sampler that Lightning has put into an evaluation loader give every sample to one rank, and to one only.

    torch's ``DistributedSampler`` repeats samples until all ranks have equally many; a mean over them would be another
    number than that of one process. With fewer samples than ranks nothing is changed: a rank without any could not take
    part.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    samples = len(sampler.dataset)  # type: ignore[arg-type]  # sized, or the sampler could not have been made
    if samples >= sampler.num_replicas:
        sampler.total_size = samples
        sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))


@contextmanager
def kept_metrics(module: nn.Module) -> Iterator[None]:
    """Leaves the states of all torchmetrics below ``module`` as they were before the context."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    before = [{name: _copy(state) for name, state in metric.metric_state.items()} for metric in metrics]
    try:
        yield
    finally:
        for metric, states in zip(metrics, before, strict=True):
            for name, state in states.items():
                setattr(metric, name, state)


def _copy(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return state.clone() if isinstance(state, Tensor) else list(state)
