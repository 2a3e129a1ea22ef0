"""A run with saves is bitwise the run without; an asynchronous save is bitwise a synchronous one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pardist.checkpoint import Saver, load_checkpoint
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs


def accumulate(layout: str, folder: str | None, kind: str = "sharded", optimizer: str = "adamw") -> dict[str, Any]:
    """Trains with two micro-batches per step, saving at every point if a folder is given; freezes and unfreezes."""
    run = runs.build(layout, optimizer=optimizer)
    saver = Saver(CheckpointOptions(async_save=True, format=kind, timeout_s=120), runs.control()) if folder else None
    rank, size = runs.world()

    def save(name: str) -> None:
        if saver:
            saver.save(f"{folder}/{name}", run.state())

    save("before the first step")
    for step in range(4):
        if step == 2:
            run.module.blocks[0].down.weight.requires_grad_(False)
        if step == 3:
            run.module.blocks[0].down.weight.requires_grad_(True)
        for half in range(2):
            run.root(runs.batch(2 * step + half).chunk(size)[rank]).backward()
            save("in a window")
        run.optimizers[0].step()
        save("between step and zero_grad")
        run.optimizers[0].zero_grad()
        run.schedulers[0].step()
    if saver:
        saver.close()
    return {**runs.weights(run.module), **runs.optimizer_state(run)}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_saving_changes_nothing(run_single: Any, tmp_path: Path, optimizer: str) -> None:
    without = run_single(accumulate, "single", None, "sharded", optimizer)
    for kind in ("sharded", "full"):
        saved = run_single(accumulate, "single", str(tmp_path / kind), kind, optimizer)
        assert runs.same(without, saved) == []


@pytest.mark.parametrize("layout", ["fsdp4", "hybrid2x2"])
def test_saving_changes_nothing_on_a_mesh(run_distributed: Any, tmp_path: Path, layout: str) -> None:
    without = run_distributed(accumulate, layout, None, world_size=4)[0]
    saved = run_distributed(accumulate, layout, str(tmp_path), world_size=4)[0]
    assert runs.same(without, saved) == []


def sync_and_async(layout: str, folder: str) -> dict[str, Any]:
    group = runs.control()
    run = runs.build(layout)
    runs.train(run, range(2))
    options = CheckpointOptions(timeout_s=120)
    Saver(options, group).save(f"{folder}/sync", run.state())
    behind = Saver(CheckpointOptions(async_save=True, timeout_s=120), group)
    handle = behind.save(f"{folder}/async", run.state())
    runs.train(run, range(2, 4))  # writes into the live tensors while the copies are written
    behind.save(f"{folder}/async-2", run.state())  # joins the first, uses its buffers again
    behind.wait()
    assert handle.done and 0 < handle.stall_s <= handle.total_s
    out = {}
    for name in ("sync", "async"):
        fresh = runs.build(layout)
        load_checkpoint(f"{folder}/{name}", fresh.state(), control_group=group)
        out[name] = {**runs.weights(fresh.module), **runs.optimizer_state(fresh)}
    return out


def test_async_equals_sync(run_distributed: Any, tmp_path: Path) -> None:
    states = run_distributed(sync_and_async, "fsdp4", str(tmp_path), world_size=4)[0]
    assert runs.same(states["sync"], states["async"]) == []


def keep_gathered(folder: str) -> None:
    """Saves while FSDP keeps whole parameters between micro-batches, as ZeRO-1 does."""
    run = runs.build("fsdp4")
    group = runs.control()
    run.root.set_reshard_after_backward(False)
    run.root.set_requires_gradient_sync(False)
    rank, size = runs.world()
    run.root(runs.batch(0).chunk(size)[rank]).backward()
    Saver(CheckpointOptions(timeout_s=120), group).save(f"{folder}/gathered", run.state())
    run.root.set_requires_gradient_sync(True)
    run.root.set_reshard_after_backward(True)
    run.root(runs.batch(1).chunk(size)[rank]).backward()
    run.optimizers[0].step()
    got = runs.weights(run.module)

    plain = runs.build("fsdp4")
    for step in range(2):
        plain.root(runs.batch(step).chunk(size)[rank]).backward()
    plain.optimizers[0].step()
    for name, value in runs.weights(plain.module).items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    load_checkpoint(f"{folder}/gathered", runs.build("fsdp4").state(), control_group=group)


def test_saving_while_parameters_are_gathered(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(keep_gathered, str(tmp_path), world_size=4)
