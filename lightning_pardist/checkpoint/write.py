"""The sharded format: each rank writes its boxes, rank 0 what describes them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_pardist.base.version import __version__
from lightning_pardist.checkpoint import manifest, objects, publish
from lightning_pardist.checkpoint.checksums import ChecksummedFiles
from lightning_pardist.checkpoint.exchange import CheckpointError, Exchange, ToAll
from lightning_pardist.checkpoint.pieces import Entry
from lightning_pardist.checkpoint.plan import GlobalPlan, Held
from lightning_pardist.checkpoint.publish import Draft
from lightning_pardist.checkpoint.state import MODEL, Snapshot, TrainState
from lightning_pardist.checkpoint.storage import LocalStorage, Storage

METADATA = ".metadata"
"""What torch.distributed.checkpoint calls its own description."""


@dataclass(frozen=True)
class SaveInfo:
    """What the caller knows about a checkpoint; written into its manifest."""

    step: int | None = None
    """Optimizer steps done."""
    epoch: int | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Plain data, as ``{"data_parallel_shard": 4}``: tells a resume on the same layout from one on another."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Plain data of the caller's."""


@dataclass
class Job:
    """A save after planning: nothing in it changes while training goes on, if the save is asynchronous."""

    storage: Storage
    draft: Draft
    snapshot: Snapshot
    tensors: dict[tuple[int, int], Tensor]
    """What this rank writes, by entry and piece."""
    info: SaveInfo
    plan: GlobalPlan | None
    """Rank 0 only."""
    held: list[tuple[Held, ...]]
    """Rank 0 only: what every rank holds."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Small files that this rank writes."""
    pickled: dict[str, list[str]] = field(default_factory=dict)
    failure: Exception | None = None
    """What went wrong on this rank between planning and writing; reported where all ranks report."""

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self.failure is not None:
            raise self.failure

    def pack(self, state: TrainState, rank: int) -> None:
        """Serializes what is no tensor."""
        if state.rank_state is not None:
            self._add(objects.rank_file(rank), state.rank_state)
        if rank == 0:
            self._add(objects.TRAINER, dict(state.trainer))
            content = {"optimizers": self.snapshot.optimizers, "module_objects": self.snapshot.module_objects}
            self._add(objects.OBJECTS, content)

    def _add(self, name: str, value: Mapping[str, Any]) -> None:
        payload = objects.pack(value)
        self.files[name] = payload
        if unsafe := objects.unsafe_keys(BytesIO(payload)):
            self.pickled[name] = unsafe


@dataclass(frozen=True)
class _Written:
    """What a rank reports after writing."""

    results: list[WriteResult]
    records: dict[str, manifest.FileRecord]
    pickled: dict[str, list[str]]


def write_sharded(job: Job, exchange: Exchange) -> None:
    """Writes this rank's files and takes part in publishing.

    Raises:
        CheckpointError: on all ranks, if any rank failed. The draft is gone and the target as it was.
    """
    published = False

    def decide(reports: list[_Written]) -> ToAll[None]:
        nonlocal published
        _finish(job, reports)
        published = True
        return ToAll(None)

    try:
        exchange.round("writing the checkpoint", lambda: _write_own(job, exchange), decide)
    finally:
        if exchange.rank == 0 and not published:
            publish.abandon(job.storage, job.draft)


def _write_own(job: Job, exchange: Exchange) -> _Written:
    job.check()
    storage, folder = job.storage, job.draft.folder
    entries = job.snapshot.entries
    items = {_index(entries[e], p): (_write_item(entries[e], p), tensor) for (e, p), tensor in job.tensors.items()}
    writer = storage.writer(folder)
    writer.set_up_storage_writer(exchange.rank == 0, rank=exchange.rank, use_collectives=True)
    plan = writer.prepare_local_plan(SavePlan([item for item, _ in items.values()]))
    others = [SavePlan([])] * exchange.world_size
    plan = writer.prepare_global_plan([*others[: exchange.rank], plan, *others[exchange.rank + 1 :]])[exchange.rank]
    given = _Given({index: tensor for index, (_, tensor) in items.items()})
    local = isinstance(storage, LocalStorage)
    passing = ChecksummedFiles(writer.fs)
    if not local:
        writer.fs = passing  # type: ignore[assignment]
    results = writer.write_data(plan, given).value()
    for name, payload in job.files.items():
        with storage.open(storage.join(folder, name), "wb") as file:
            file.write(payload)
    records = {name: manifest.record_of_bytes(payload) for name, payload in job.files.items()}
    data = {result.storage_data.relative_path for result in results}
    # While the disk takes what is still in memory, the processors sum it up: reading it back costs no time of its own.
    with ThreadPoolExecutor(1) as pool:
        flushes = [pool.submit(storage.flush, storage.join(folder, name)) for name in (*data, *job.files)]
        reread = {name: manifest.record_of(storage, storage.join(folder, name)) for name in data} if local else {}
        for flush in flushes:
            flush.result()
    records.update(reread or passing.records())
    if len(results) != len(items):
        raise CheckpointError(f"{len(results)} of {len(items)} tensors were written to {folder}")
    return _Written(results, records, job.pickled)


def _finish(job: Job, reports: list[_Written]) -> None:
    """Rank 0, after all have written: describe, check, publish."""
    assert job.plan is not None
    storage, folder = job.storage, job.draft.folder
    metadata = job.plan.metadata(job.held)
    storage.writer(folder).finish(metadata, [report.results for report in reports])
    files = {name: record for report in reports for name, record in report.records.items()}
    files[METADATA] = manifest.record_of(storage, storage.join(folder, METADATA))
    storage.flush(storage.join(folder, METADATA))
    content = describe(job, files, [report.pickled for report in reports])
    missing = [name for name, record in files.items() if not _has(storage, storage.join(folder, name), record.bytes)]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see {', '.join(missing[:5])} in {folder}: all ranks must write to one shared file system"
        )
    publish.publish(storage, job.draft, content)


def describe(job: Job, files: dict[str, manifest.FileRecord], pickled: list[dict[str, list[str]]]) -> manifest.Manifest:
    """Returns the manifest of a save."""
    assert job.plan is not None
    now = time.time_ns()
    model = [name for name in job.plan.sizes if name.startswith(MODEL)]
    return manifest.Manifest(
        package_version=__version__,
        torch_version=str(torch.__version__),
        created=datetime.datetime.fromtimestamp(now / 1e9, datetime.timezone.utc).isoformat(timespec="seconds"),
        created_ns=now,
        step=job.info.step,
        epoch=job.info.epoch,
        layout=dict(job.info.layout),
        world_size=len(job.held),
        model={"tensors": len(model), "bytes": sum(_bytes(job.plan, name) for name in model)},
        optimizers=[_summary(optimizer) for optimizer in job.snapshot.optimizers],
        aliases=job.snapshot.aliases,
        pickled={name: keys for report in pickled for name, keys in report.items()},
        files=files,
        data=job.draft.data,
        extra=dict(job.info.extra),
    )


class _Given(DefaultSavePlanner):
    """Hands the writer tensors that are at hand already: the planning is done."""

    def __init__(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self._tensors[write_item.index]


def _index(entry: Entry, piece: int) -> MetadataIndex:
    return MetadataIndex(entry.name, torch.Size(entry.pieces[piece].offset))


def _write_item(entry: Entry, piece: int) -> WriteItem:
    part = entry.pieces[piece]
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(part.offset), part.view.shape),
        TensorProperties(dtype=entry.dtype),
        torch.Size(entry.shape),
    )
    return WriteItem(_index(entry, piece), WriteItemType.SHARD, tensor_data=data)


def _has(storage: Storage, path: str, size: int) -> bool:
    return storage.is_file(path) and storage.size(path) == size


def _bytes(plan: GlobalPlan, name: str) -> int:
    shape, dtype = plan.sizes[name]
    return torch.Size(shape).numel() * dtype.itemsize


def _summary(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, type(None))
    return {
        "class": optimizer["class"],
        "groups": [
            {
                "parameters": len(group["params"]),
                "options": {k: v for k, v in group["options"].items() if isinstance(v, plain)},
            }
            for group in optimizer["groups"]
        ],
    }
