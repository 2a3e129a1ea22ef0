"""Where a run was in its training data, and how to go on at the next unseen sample with other ranks or batches.

[Note: rows] All ranks together take the samples of an epoch in one order: that of the loader's sampler, of which a
``DistributedSampler`` deals every n-th sample to a rank. So ``batches x batch size x ranks`` tells how much of that
order is used up, whatever the layout; on another layout every rank leaves out its share of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, SequentialSampler

from lightning_pardist.base.log import get_logger
from lightning_pardist.strategies.batches import LoaderAround, dealt_sampler

log = get_logger(__name__)


@dataclass(frozen=True)
class Offset:
    """What the running epoch had behind it when this process took it over on another layout."""

    rows: int
    batches: int
    """Of this layout: what the loop counted as done."""


def describe(
    loaders: Sequence[Any], batches: int, data_parallel_size: int, offset: Offset | None, *, is_first: bool
) -> dict[str, Any]:
    """Returns, as plain data, how far the loaders are in the running epoch.

    Args:
        loaders: the training loaders as they run.
        batches: done in this epoch.
        data_parallel_size: ranks with batches of their own.
        offset: set if this epoch began on another layout.
        is_first: whether this is rank 0, whose answer is written.
    """
    start = offset or Offset(0, 0)
    rows = []
    for loader in loaders:
        size = _batch_size(loader)
        rows.append(None if size is None else start.rows + (batches - start.batches) * size * data_parallel_size)
    if is_first and batches and None in rows and any(hasattr(loader, "state_dict") for loader in loaders):
        log.info("a training loader tells no batch size: its position can be resumed on the same layout only")
    return {
        "rows": rows,
        "orders": [_order(loader) for loader in loaders],
        "batch_sizes": batch_sizes(loaders),
        "size": data_parallel_size,
        "moved": offset is not None,
    }


def batch_sizes(loaders: Sequence[Any]) -> list[int | None]:
    """Returns each loader's batch size on this rank; None where it does not tell."""
    return [_batch_size(loader) for loader in loaders]


class Move:
    """Takes the loaders of this layout to where the loaders of another were.

    Args:
        saved: what ``describe`` returned when the checkpoint was made.
        batches: of the saved layout that were done.
        data_parallel_size: ranks of this layout with batches of their own.
        in_epoch: whether the epoch in which the checkpoint was made is still running.
    """

    def __init__(
        self, saved: Mapping[str, Any], batches: int, data_parallel_size: int, in_epoch: Callable[[], bool]
    ) -> None:
        self._saved = saved
        self._batches = batches
        self._size = data_parallel_size
        self._in_epoch = in_epoch
        self._next = 0
        self.done = batches
        """Batches of this layout that count as done."""
        self.offset: Offset | None = None
        """Set if the position lies in the sampler, of which the loader's own state does not know."""

    def apply(self, loader: Any) -> Any:
        """Returns the next of the training loaders, which come in the order of the save, in its place."""
        index, self._next = self._next, self._next + 1
        rows, orders = self._saved["rows"], self._saved["orders"]
        consumed = rows[index] if index < len(rows) else None
        batch_size = _batch_size(loader)
        if consumed is None or batch_size is None:
            log.warning(
                "the position in the training data cannot be moved to this layout, since a loader tells no batch size: "
                "the rest of the epoch reads it from its beginning"
            )
            return loader
        if orders[index] is None or orders[index] != _order(loader):
            log.warning(
                "the training loader's order is another on this layout (%s, now %s): %d samples are left out as seen, "
                "and need not be the same ones",
                orders[index] or "its own",
                _order(loader) or "its own",
                consumed,
            )
        if len(rows) == 1 and _has_open_sampler(loader):
            return self._within_sampler(loader, consumed)
        batches, rest = divmod(consumed, batch_size * self._size)
        if rest:
            log.warning("%d sample(s) of the epoch are seen twice: batches of this layout do not meet them", rest)
        self.done = batches
        return skip_first(loader, batches)

    def _within_sampler(self, loader: Any, consumed: int) -> Any:
        own, rest = divmod(consumed, self._size)
        if rest:
            log.warning("%d sample(s) of the epoch are seen twice: %d ranks cannot share them", rest, self._size)
        batch_sampler = loader.batch_sampler
        left = max(0, len(batch_sampler.sampler) - own)
        whole, part = divmod(left, batch_sampler.batch_size)
        batch_sampler.sampler = FromSample(batch_sampler.sampler, own, self._in_epoch)
        # So that what is left of the epoch is exactly as many batches as there are samples for.
        self.done = max(0, len(loader) - (whole + (part > 0 and not batch_sampler.drop_last)))
        self.offset = Offset(own * self._size, self.done)
        return loader


class FromSample(Sampler[int]):
    """A sampler that leaves out the first samples of one epoch."""

    def __init__(self, sampler: Sampler[int], skip: int, in_epoch: Callable[[], bool]) -> None:
        self.inner = sampler
        self._skip = skip
        self._in_epoch = in_epoch

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.inner), self._skip if self._in_epoch() else 0, None)

    def __len__(self) -> int:
        """Returns the length of a whole epoch, by which progress is counted."""
        return len(self.inner)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to samplers that shuffle by it."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)


class _SkipFirst(LoaderAround):
    """Leaves out the first batches once: they were seen before the run was interrupted."""

    def __init__(self, loader: Any, batches: int) -> None:
        super().__init__(loader)
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        skip, self._batches = self._batches, 0
        for _ in range(skip):
            next(batches, None)
        return batches


class _SizedSkipFirst(_SkipFirst):
    """The same, of a loader that knows its length. (Lightning looks for ``__len__``.)"""

    def __len__(self) -> int:
        return len(self._loader)


def skip_first(loader: Any, batches: int) -> Any:
    """Returns a loader that leaves out its first batches once."""
    if not batches:
        return loader
    return (_SkipFirst if sized_len(loader) is None else _SizedSkipFirst)(loader, batches)


class _NextEpoch(LoaderAround):
    """Begins an epoch from a state in which the one before had been read to its end."""

    def __init__(self, loader: Any, state: Any, before: Callable[[], None]) -> None:
        super().__init__(loader)
        self._state = state
        self._before: Callable[[], None] | None = before

    def __iter__(self) -> Iterator[Any]:
        before, self._before = self._before, None
        if before is not None:
            if self._state is not None:
                self._loader.load_state_dict(self._state)
                iter(self._loader)  # takes it up: nothing is left, and a sampler that shuffles has drawn
            before()
        return iter(self._loader)


class _SizedNextEpoch(_NextEpoch):
    """The same, of a loader that knows its length. (Lightning looks for ``__len__``.)"""

    def __len__(self) -> int:
        return len(self._loader)


def next_epoch(loader: Any, state: Any, before: Callable[[], None]) -> Any:
    """Returns a loader that begins an epoch.

    Args:
        loader: the loader of this run.
        state: its state at the end of the epoch before; None if it keeps none. (Lightning would lose it, or take the
            new epoch for one that is over.)
        before: called when the epoch begins.
    """
    return (_NextEpoch if sized_len(loader) is None else _SizedNextEpoch)(loader, state, before)


class ReadAhead(LoaderAround):
    """Keeps the state of a loader from which Lightning reads one batch ahead, to know which is the last.

    What was read and not trained on must come again after a resume, so the state before it is remembered.
    """

    def __init__(self, loader: Any, ahead: Callable[[], int]) -> None:
        super().__init__(loader)
        self._ahead = ahead
        self._before: Any = None
        setattr(self, "state_dict", self._state)  # noqa: B010  # in place of the one that is lent

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._before = self._loader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _state(self) -> Any:
        return self._before if self._ahead() and self._before is not None else self._loader.state_dict()


def batches_done(loops: Mapping[str, Any]) -> int:
    """Returns how many batches of the running epoch the saved training loop had finished."""
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    return 0 if progress.get("is_last_batch") else int(progress["current"]["ready"])


def count_running_epoch(loops: Mapping[str, Any]) -> None:
    """Counts the running epoch of a saved training loop as started, in place, where Lightning has not.

    Resumed from a save at an epoch's last batch, Lightning 2.6 runs the next epoch without counting it as started.
    Saved once more in that epoch, its counters say that no epoch is running: the next resume would begin another one,
    in another order, and train one too many.
    """
    progress = loops["fit_loop"]["epoch_progress"]
    missing = int(progress["current"]["processed"]) + 1 - int(progress["current"]["started"])
    if missing > 0 and (batches_done(loops) or at_last_batch(loops)):
        for counts in (progress["current"], progress["total"]):
            counts["ready"] += missing
            counts["started"] += missing


def in_epoch(loops: Mapping[str, Any]) -> bool:
    """Returns whether the saved training loop has still to end the epoch that it was in.

    After a save at the very end of an epoch's last batch Lightning goes on with the next epoch at once.
    """
    epoch = loops["fit_loop"]["epoch_progress"]["current"]
    return int(epoch["processed"]) < int(epoch["started"]) and not at_last_batch(loops)


def at_last_batch(loops: Mapping[str, Any]) -> bool:
    """Returns whether the loop was saved when the last batch of an epoch was trained on, and nothing else done."""
    batch = loops["fit_loop"]["epoch_loop.batch_progress"]
    return bool(batch.get("is_last_batch")) and batch["current"]["completed"] < batch["current"]["processed"]


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _order(loader: Any) -> str | None:
    """Returns a word for the order in which all ranks together read; None if it is the loader's own affair."""
    sampler = dealt_sampler(loader)
    while isinstance(sampler, FromSample):
        sampler = sampler.inner
    if type(sampler) is DistributedSampler:
        return f"shuffled by seed {sampler.seed}" if sampler.shuffle else "in order"
    return "in order" if isinstance(sampler, SequentialSampler) else None


def _has_open_sampler(loader: Any) -> bool:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return (
        isinstance(batch_sampler, BatchSampler)
        and sized_len(loader) is not None
        and _order(loader) is not None
        and isinstance(batch_sampler.batch_size, int)
    )
