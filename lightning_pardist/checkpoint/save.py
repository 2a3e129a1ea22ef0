"""Saving: plan together, copy or not, write apart, publish together."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_pardist.base.log import get_logger
from lightning_pardist.checkpoint import lock, publish, staging
from lightning_pardist.checkpoint.exchange import Exchange
from lightning_pardist.checkpoint.full import write_full
from lightning_pardist.checkpoint.plan import Assignment, GlobalPlan, Held, Holding, Planner
from lightning_pardist.checkpoint.publish import Draft
from lightning_pardist.checkpoint.state import Snapshot, TrainState, refuse_sharded, take_snapshot
from lightning_pardist.checkpoint.storage import Storage, open_storage
from lightning_pardist.checkpoint.write import Job, SaveInfo, write_sharded
from lightning_pardist.specs.checkpoint_options import CheckpointOptions

_log = get_logger(__name__)
_LAST_WAIT_S = 60.0
_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


@dataclass
class SaveHandle:
    """One save, done or under way."""

    path: str
    stall_s: float = 0.0
    """Seconds for which training stood still."""
    total_s: float = 0.0
    """Seconds from the call to the published checkpoint."""
    error: Exception | None = None
    """Why the checkpoint was not written; with ``on_save_error="raise"`` it is raised by ``wait`` as well."""
    _thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Runs ``work`` behind."""
        # A daemon: a run that fails elsewhere must be able to end. What it leaves is cleaned up at the next start.
        self._thread = threading.Thread(target=work, name="pardist-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when nothing is written any more; the writer's own waits end by ``CheckpointOptions.timeout_s``."""
        if self._thread is not None:
            self._thread.join(timeout_s)


@dataclass(frozen=True)
class _Request:
    """What a rank tells rank 0 at the start of a save."""

    path: str
    holding: Holding
    group_names: list[list[list[str]]]
    """Parameter names per optimizer and group; ranks of a pipeline hold different ones."""
    values: list[dict[str, dict[str, Any]]]
    module_objects: dict[str, Any]


@dataclass(frozen=True)
class _Orders:
    """What rank 0 answers."""

    draft: Draft
    assignment: Assignment


class Saver:
    """Writes the checkpoints of one run, one after the other.

    Args:
        options: see ``CheckpointOptions``.
        control_group: host (gloo) group of all ranks that this object alone uses: a save that is being written behind
            talks on it at any time. None in a run of one process.
    """

    def __init__(
        self, options: CheckpointOptions | None = None, control_group: dist.ProcessGroup | None = None
    ) -> None:
        self.options = options or CheckpointOptions()
        self.exchange = Exchange(control_group, self.options.timeout_s)
        self._planner = Planner()
        self._buffers = staging.HostBuffers()
        self.pending: SaveHandle | None = None
        """The save under way."""
        self._folders: set[tuple[Storage, str]] = set()
        _savers.add(self)

    def save(self, path: str, state: TrainState, info: SaveInfo | None = None) -> SaveHandle:
        """Writes a checkpoint; every rank calls it at the same point of the run.

        With ``async_save`` it returns as soon as training may go on. A save that is still being written is joined
        first, and its error is raised here.

        Args:
            path: folder (``sharded``) or file (``full``), local or a URL; rank 0's counts.
            state: the live objects.
            info: step, epoch, layout and what else the manifest should say.

        Raises:
            ValueError: on all ranks, if something else lies at ``path``, or state cannot be stored.
            CheckpointError: on all ranks, if any rank cannot write. What lay at ``path`` before is untouched.
        """
        started = time.monotonic()
        self.wait()
        handle = SaveHandle(path)
        try:
            job = self._prepare(path, state, info or SaveInfo())
        except Exception as error:
            return self._failed(handle, error)
        handle.path = job.draft.target
        self.pending = handle
        if self.options.async_save:
            handle.start(lambda: self._write(job, handle, started))
            handle.stall_s = time.monotonic() - started
        else:
            self._write(job, handle, started)
            handle.stall_s = handle.total_s
            self.wait()
        return handle

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError: what the save that was under way failed with, unless ``on_save_error="warn"``. Once.
        """
        handle, self.pending = self.pending, None
        if handle is None:
            return
        handle.wait()
        if handle.error is not None and self.options.on_save_error == "raise":
            raise handle.error

    def close(self) -> None:
        """Joins the save under way and gives the folders back to other runs."""
        try:
            self.wait()
        finally:
            for storage, folder in self._folders:
                lock.release(storage, folder)
            self._folders.clear()

    def _prepare(self, path: str, state: TrainState, info: SaveInfo) -> Job:
        """Everything that needs the live state: when it returns, an async save leaves training alone."""
        storage, target = open_storage(path, self.options.storage_options)
        snapshot: Snapshot | None = None

        def ask() -> _Request:
            nonlocal snapshot
            refuse_sharded("trainer", state.trainer)
            refuse_sharded("rank", state.rank_state)
            snapshot = take_snapshot(state)
            return _Request(
                target,
                self._planner.holding(snapshot.entries),
                [[group["params"] for group in optimizer["groups"]] for optimizer in snapshot.optimizers],
                [optimizer["values"] for optimizer in snapshot.optimizers],
                snapshot.module_objects,
            )

        lead = _Lead(storage, self._planner, self.options.format == "sharded")
        try:
            orders = self.exchange.round("planning the save", ask, lead.decide)
        except Exception:
            self._planner.forget()
            raise
        assert snapshot is not None
        if lead.plan is not None:
            lead.merge_into(snapshot, state.parameter_order)
            self._folders.add((storage, storage.split(target)[0]))
        job = Job(storage, orders.draft, snapshot, {}, info, lead.plan, lead.held)
        try:
            # A full save sends from the copies; a sharded one that training waits for writes the live tensors.
            copied = self.options.async_save or self.options.format == "full"
            take = self._buffers.copy if copied else staging.live
            job.tensors = take(snapshot.entries, orders.assignment)
            job.pack(state, self.exchange.rank)
        except Exception as error:  # the other ranks hear of it where they report their own writing
            job.failure = error
        return job

    def _write(self, job: Job, handle: SaveHandle, started: float) -> None:
        try:
            (write_full if self.options.format == "full" else write_sharded)(job, self.exchange)
        except Exception as error:
            self._failed(handle, error, raises=False)
        handle.total_s = time.monotonic() - started

    def _failed(self, handle: SaveHandle, error: Exception, *, raises: bool = True) -> SaveHandle:
        handle.error = error
        if self.options.on_save_error == "warn":
            if self.exchange.rank == 0:
                _log.warning("%s was not written; training goes on.\n%s", handle.path, error)
        elif raises:
            raise error
        return handle


class _Lead:
    """Rank 0's side of the planning; the other ranks have one that stays empty."""

    def __init__(self, storage: Storage, planner: Planner, is_folder: bool) -> None:
        self.storage = storage
        self.planner = planner
        self.is_folder = is_folder
        self.plan: GlobalPlan | None = None
        self.held: list[tuple[Held, ...]] = []
        self.requests: list[_Request] = []

    def decide(self, requests: list[_Request]) -> list[_Orders]:
        self.requests = requests
        self.plan, self.held = self.planner.plan([request.holding for request in requests])
        draft = publish.begin(self.storage, requests[0].path, is_folder=self.is_folder)
        return [_Orders(draft, assignment) for assignment in self.plan.assignments]

    def merge_into(self, snapshot: Snapshot, order: Sequence[str] | None) -> None:
        """Adds to rank 0's snapshot what only other ranks hold: names in groups, values, objects."""
        position = {name: index for index, name in enumerate(order or ())}
        for request in self.requests[1:]:
            for key, value in request.module_objects.items():
                snapshot.module_objects.setdefault(key, value)
            for saved, groups, values in zip(snapshot.optimizers, request.group_names, request.values):
                for name, value in values.items():
                    saved["values"].setdefault(name, value)
                for group, names in zip(saved["groups"], groups):
                    if group["params"] != names:
                        group["params"] = list(dict.fromkeys([*group["params"], *names]))
        if position:
            for saved in snapshot.optimizers:
                for group in saved["groups"]:
                    group["params"].sort(key=lambda name: position.get(name, len(position)))


def save_checkpoint(
    path: str,
    state: TrainState,
    info: SaveInfo | None = None,
    *,
    options: CheckpointOptions | None = None,
    control_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Writes one checkpoint; a run that writes several keeps a ``Saver``, which remembers plans and buffers.

    The folder is free for other runs afterwards, or with ``async_save`` at the end of the process.
    """
    saver = Saver(options, control_group)
    try:
        return saver.save(path, state, info)
    finally:
        if not saver.options.async_save:
            saver.close()


@atexit.register
def _finish_saves() -> None:
    """Gives a save under way a last chance when a run ends without ``close``."""
    for saver in list(_savers):
        if saver.pending is not None:
            saver.pending.wait(_LAST_WAIT_S)
