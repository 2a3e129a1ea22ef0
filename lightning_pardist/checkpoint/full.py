"""The full format: one ordinary Lightning ``.ckpt`` file, put together on rank 0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_pardist.checkpoint import objects, publish
from lightning_pardist.checkpoint.exchange import Exchange, ToAll
from lightning_pardist.checkpoint.state import MODEL, OPTIMIZER
from lightning_pardist.checkpoint.write import Job

OURS = "lightning_pardist"
"""Our key in a Lightning checkpoint; Lightning ignores it. Holds the parameters' names, which ids alone do not tell."""


def write_full(job: Job, exchange: Exchange) -> None:
    """Gathers the state on rank 0, which writes the file.

    Raises:
        CheckpointError: on all ranks, if any rank failed. The file that was there before is untouched.
    """
    done = False
    failure: Exception | None = None
    try:
        exchange.round("copying the state", job.check, lambda _: ToAll(None))
        tensors: dict[str, Tensor] = {}
        try:
            tensors = gather(job, exchange)
        except Exception as error:  # reported below, where the other ranks wait
            failure = error

        def write() -> None:
            if failure is not None:
                raise failure
            if exchange.rank == 0:
                _write_file(job, tensors)

        exchange.round("writing the checkpoint", write, lambda _: ToAll(None))
        done = True
    finally:
        if exchange.rank == 0 and not done:
            publish.abandon(job.storage, job.draft)


def gather(job: Job, exchange: Exchange) -> dict[str, Tensor]:
    """Returns every tensor whole on rank 0, nothing on the others. Boxes travel one by one through host memory.

    Every rank sends in the order in which rank 0 receives, tensor by tensor, so no rank holds more than its own copies
    and the box on its way.
    """
    if exchange.rank != 0:
        for _, tensor in sorted(job.tensors.items()):
            exchange.send(tensor.contiguous(), 0)
        return {}
    assert job.plan is not None
    whole = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in job.plan.sizes.items()}
    owned = sorted(
        (rank, entry, piece, name) for name, owners in job.plan.owners.items() for rank, entry, piece in owners
    )
    for rank, entry, piece, name in owned:
        offset, size = job.held[rank][entry][4][piece]
        target = whole[name]
        for dim, (start, length) in enumerate(zip(offset, size)):
            target = target.narrow(dim, start, length)
        if rank == 0:
            target.copy_(job.tensors[entry, piece])
        elif target.is_contiguous():
            exchange.receive(target, rank)
        else:
            box = torch.empty(size, dtype=target.dtype)
            exchange.receive(box, rank)
            target.copy_(box)
    return whole


def lightning_checkpoint(
    tensors: Mapping[str, Tensor], content: Mapping[str, Any], aliases: Mapping[str, str], trainer: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the dictionary that plain Lightning saves and loads.

    Args:
        tensors: whole tensors under this package's keys.
        content: what ``objects.pt`` holds.
        aliases: tied names, which Lightning's ``state_dict`` lists as well.
        trainer: what ``trainer.pt`` holds.
    """
    state: dict[str, Any] = {key[len(MODEL) :]: value for key, value in tensors.items() if key.startswith(MODEL)}
    state.update({alias: state[name] for alias, name in aliases.items() if name in state})
    state.update(content["module_objects"])
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            owner, _, state_key = key.rpartition(".")
            by_parameter.setdefault(owner, {})[state_key] = value
    optimizer_states, parameter_names = [], []
    for index, saved in enumerate(content["optimizers"]):
        ordered = [name for group in saved["groups"] for name in group["params"]]
        ids = {name: i for i, name in enumerate(ordered)}
        groups = [{**group["options"], "params": [ids[n] for n in group["params"]]} for group in saved["groups"]]
        kept = {
            i: {**by_parameter.get(f"{OPTIMIZER}{index}.{name}", {}), **saved["values"].get(name, {})}
            for name, i in ids.items()
        }
        optimizer_states.append({"state": {i: s for i, s in kept.items() if s}, "param_groups": groups})
        parameter_names.append(ordered)
    ours = {"parameter_names": parameter_names, "classes": [saved["class"] for saved in content["optimizers"]]}
    return {**trainer, "state_dict": state, "optimizer_states": optimizer_states, OURS: ours}


def _write_file(job: Job, tensors: Mapping[str, Tensor]) -> None:
    storage, draft = job.storage, job.draft
    trainer = objects.unpack_own(job.files[objects.TRAINER])
    content = objects.unpack_own(job.files[objects.OBJECTS])
    checkpoint = lightning_checkpoint(tensors, content, job.snapshot.aliases, trainer)
    if not storage.renames_atomically:  # an object appears whole when it is closed
        with storage.open(draft.target, "wb") as file:
            torch.save(checkpoint, file)
        return
    with storage.open(draft.folder, "wb") as file:
        torch.save(checkpoint, file)
    storage.flush(draft.folder)
    os.replace(draft.folder, draft.target)
    storage.flush(storage.split(draft.target)[0])
