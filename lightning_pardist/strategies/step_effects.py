"""What steps leave in plain attributes of the LightningModule, on every stage as in one process.

``self.outputs.append(loss)`` in a step and ``self.outputs.clear()`` in an epoch's hook is how Lightning's own migration
guide collects what an epoch needs. Under pipeline parallelism the step runs on every stage, up to a cut, and to its
end on the last one only, once per micro-batch. What the last stage's runs add to lists is joined over the micro-batches
as returned values are, and takes the place of what other stages' runs have added there; values that the last stage sets
are set everywhere. What only an earlier stage changes, in a block of its own, stays as it is.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pardist.base.log import get_logger
from lightning_pardist.base.nested import map_leaves, tensors_of
from lightning_pardist.run.microbatches import merge_outputs
from lightning_pardist.strategies.pipeline_logs import to_device, to_host

log = get_logger(__name__)

MOST_BYTES = 64 << 20
"""Of the tensors that one step may leave: whoever collects more has no use for copies of it on every stage."""
_MOST_KEYS = 256
"""Larger dicts are tables, not what a step writes to."""
_DEEPEST = 8
"""Dicts in dicts; one may hold itself."""

Path = tuple[Any, ...]
"""The attribute's name, and keys of dicts inside it."""


@dataclass
class Effects:
    """Of one step on one batch; what one stage sends to the others."""

    grown: dict[Path, list[Any]] = field(default_factory=dict)
    """Items that lists have got."""
    set: dict[Path, Any] = field(default_factory=dict)
    """New values."""


class StepEffects:
    """Of one module's steps."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._own = frozenset(vars(LightningModule()))
        self._before: dict[Path, Any] = {}
        self._micros: list[Effects] = []
        self._warned = False

    def start(self) -> None:
        """Is called before the micro-batches of a step."""
        self._before = self._seen()
        self._micros = []

    @contextmanager
    def around(self, *, is_last: bool) -> Iterator[None]:
        """Is entered around the user's step on one micro-batch.

        Args:
            is_last: this stage runs the step to its end.
        """
        before = self._seen() if is_last else {}
        yield
        if is_last:
            self._micros.append(_difference(before, self._seen()))

    def joined(self, sizes: Sequence[int], weights: Sequence[float]) -> bytes | None:
        """Returns what the step has left on the last stage, which then has it in this form too; None if nothing.

        Args:
            sizes: rows of the micro-batches.
            weights: of their losses.
        """
        found = Effects()
        for micro in self._micros:
            found.set.update(micro.set)
        for path in dict.fromkeys(path for micro in self._micros for path in micro.grown):
            if path not in found.set:
                found.grown[path] = self._items(path, sizes, weights)
        if not found.grown and not found.set:
            return None
        result = self._packed(found)
        if result is not None:
            self._apply(found)
        return result

    def _items(self, path: Path, sizes: Sequence[int], weights: Sequence[float]) -> list[Any]:
        parts = [micro.grown.get(path, []) for micro in self._micros]
        counts = [len(part) for part in parts]
        # An item for every row is no value of the batch (``extend``). With one row in each part nobody can tell the two
        # apart; one by one, means come out the same.
        if len(parts) == len(sizes) and len(set(counts)) == 1 and counts != list(sizes):
            return [merge_outputs(items, sizes, weights) for items in zip(*parts, strict=True)]
        return [item for part in parts for item in part]

    def take(self, packed: bytes | None, device: torch.device) -> None:
        """Does to this stage's module what the step has done to the last one's."""
        if packed is not None:
            found: Effects = pickle.loads(packed)
            self._apply(Effects(to_device(found.grown, device), to_device(found.set, device)))

    # ---- attributes

    def _seen(self) -> dict[Path, Any]:
        """Returns lists with their length, and what may be compared and sent, by path."""
        found: dict[Path, Any] = {}
        for name, value in vars(self._module).items():
            if name not in self._own:
                _note((name,), value, found)
        return found

    def _apply(self, found: Effects) -> None:
        for path, items in found.grown.items():
            before = self._before.get(path)
            owner = self._owner(path)
            if isinstance(before, _List):
                before.list[before.length :] = items
                owner[path[-1]] = before.list
            else:
                owner[path[-1]] = items
        for path, value in found.set.items():
            self._owner(path)[path[-1]] = value

    def _owner(self, path: Path) -> dict[Any, Any]:
        owner: Any = vars(self._module)
        for key in path[:-1]:
            owner = owner.setdefault(key, {})  # a dict that the step has made is on the last stage only
        return owner

    def _packed(self, found: Effects) -> bytes | None:
        found.grown, found.set = map_leaves(_detached, (found.grown, found.set))
        size = sum(tensor.nbytes for tensor in tensors_of((found.grown, found.set)))
        what = f"{size >> 20} MiB"
        if size <= MOST_BYTES:
            try:
                return pickle.dumps(Effects(to_host(found.grown), to_host(found.set)))
            except Exception:  # of what the user's step keeps; it stays on this stage
                what = "objects that cannot be pickled"
        if not self._warned:
            self._warned = True
            log.warning(
                "a step leaves %s in %s. That stays on the last stage, once per micro-batch: return or log what hooks "
                "need on all, as numbers or small tensors",
                what, ", ".join(sorted({str(path[0]) for path in (*found.grown, *found.set)})),
            )  # fmt: skip
        return None


_NOTHING = object()


class _List:
    """A list as it was, without a copy of what was in it."""

    def __init__(self, value: list[Any]) -> None:
        self.list = value
        self.length = len(value)
        self._ends = (value[0], value[-1]) if value else (None, None)

    def is_start_of(self, other: list[Any]) -> bool:
        """Returns whether things were added at the end of the list only, as far as its first and last items tell."""
        if other is not self.list or len(other) < self.length:
            return False
        return not self.length or (other[0] is self._ends[0] and other[self.length - 1] is self._ends[1])


def _note(path: Path, value: Any, found: dict[Path, Any]) -> None:
    if isinstance(value, list):
        found[path] = _List(value)
    elif isinstance(value, dict) and len(value) <= _MOST_KEYS and len(path) < _DEEPEST:
        for key, item in value.items():
            _note((*path, key), item, found)
    elif value is None or isinstance(value, (bool, int, float, str)) or type(value) is Tensor:
        found[path] = value


def _difference(before: dict[Path, Any], after: dict[Path, Any]) -> Effects:
    found = Effects()
    for path, value in after.items():
        old = before.get(path, _NOTHING)
        if isinstance(value, _List):
            if not isinstance(old, _List):
                found.grown[path] = list(value.list)
            elif not old.is_start_of(value.list):
                found.set[path] = list(value.list)
            elif value.length > old.length:
                found.grown[path] = value.list[old.length :]
        elif value is not old and (isinstance(value, Tensor) or value != old):
            found.set[path] = value
    return found


def _detached(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item
