"""Saves that fail: the same error on all ranks, the previous checkpoint untouched, nothing left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pardist.checkpoint import (
    CheckpointError,
    Saver,
    complete_checkpoints,
    load_checkpoint,
    lock,
    newest_complete,
    publish,
    save_checkpoint,
)
from lightning_pardist.checkpoint.storage import LocalStorage
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs


def fail_on_one_rank(folder: str, where: str, options: CheckpointOptions) -> str:
    """Rank 1's disk is full at some point of the second save."""
    run, group = runs.build("fsdp4"), runs.control()
    saver = Saver(options, group)
    saver.save(f"{folder}/last", run.state())
    saver.wait()
    before = runs.weights(run.module)
    runs.train(run, range(1))
    original = getattr(LocalStorage, where)

    def full_disk(self: LocalStorage, path: str, *rest: Any) -> Any:
        if runs.world()[0] == 1:
            raise OSError(28, "No space left on device")
        return original(self, path, *rest)

    setattr(LocalStorage, where, full_disk)
    started = time.monotonic()
    try:
        handle = saver.save(f"{folder}/last", run.state(rank_state={"a": 1}))
        saver.wait()
        assert options.on_save_error == "warn" and handle.error is not None
        text = str(handle.error)
    except CheckpointError as error:
        assert options.on_save_error == "raise"
        text = str(error)
    finally:
        setattr(LocalStorage, where, original)
    assert time.monotonic() - started < 90
    load_checkpoint(f"{folder}/last", run.state(), control_group=group)
    assert runs.same(before, runs.weights(run.module)) == []
    saver.save(f"{folder}/next", run.state())  # and the saver goes on
    saver.close()
    return text


@pytest.mark.parametrize("where", ["open", "flush", "writer"])
@pytest.mark.parametrize(("behind", "on_error"), [(False, "raise"), (True, "raise"), (True, "warn")])
def test_full_disk_on_one_rank(run_distributed: Any, tmp_path: Path, where: str, behind: bool, on_error: str) -> None:
    options = CheckpointOptions(async_save=behind, on_save_error=on_error, timeout_s=120)
    texts = run_distributed(fail_on_one_rank, str(tmp_path), where, options, world_size=4)
    assert len(set(texts)) == 1
    assert "rank 1 OSError: [Errno 28] No space left" in texts[0]
    assert sorted(os.listdir(tmp_path)) == ["last", "next"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        save_checkpoint(str(tmp_path / "x"), runs.build("single").state())


def bad_state(folder: str, case: str) -> None:
    run, group = runs.build("fsdp4"), runs.control()
    if case == "lbfgs":
        run.optimizers = [torch.optim.LBFGS(run.module.parameters(), history_size=2)]
        run.optimizers[0].state[next(run.module.parameters())]["old_dirs"] = [torch.ones(2)]
    elif case == "override":
        run.optimizers = [OwnStateDict(run.module.parameters(), lr=0.1)]
    elif case == "local":
        parameter = run.module.blocks[0].up.weight
        run.optimizers[0].state[parameter]["exp_avg"] = torch.zeros_like(parameter.to_local())
    trainer = {"callbacks": {"ema": [run.module.emb.weight]}} if case == "trainer" else {}
    state = run.state()
    state.trainer = trainer
    save_checkpoint(f"{folder}/x", state, options=CheckpointOptions(timeout_s=120), control_group=group)


class OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("lbfgs", "old_dirs.*inside a container while the parameter is sharded"),
        ("override", "OwnStateDict, which has a state_dict of its own"),
        ("local", "exp_avg.*this rank's part only"),
        ("trainer", r"a DTensor at \['callbacks'\]\['ema'\]\[0\]"),
    ],
)
def test_state_that_cannot_be_stored(run_distributed: Any, tmp_path: Path, case: str, text: str) -> None:
    errors = run_distributed.errors(bad_state, str(tmp_path), case, world_size=4)
    for error in errors:
        assert isinstance(error, ValueError)
        assert error.args[0] == errors[0].args[0]
    with pytest.raises(ValueError, match=f"(?s){text}"):
        raise errors[0]
    assert os.listdir(tmp_path) == []


def test_lbfgs_in_one_process(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = torch.nn.Linear(3, 2)
        return module, torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (module(torch.ones(1, 3)) - 1).pow(2).sum()
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    module, optimizer = build()
    step(module, optimizer)
    save_checkpoint(str(tmp_path / "x"), runs.Run(module, module, [optimizer]).state())
    other, other_optimizer = build()
    load_checkpoint(str(tmp_path / "x"), runs.Run(other, other, [other_optimizer]).state())
    assert step(module, optimizer) == step(other, other_optimizer)


def test_something_else_lies_there(tmp_path: Path) -> None:
    state = runs.build("single").state()
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="a file lies there"):
        save_checkpoint(str(tmp_path / "file"), state)
    with pytest.raises(ValueError, match="not a checkpoint of lightning_pardist"):
        save_checkpoint(str(tmp_path / "folder"), state)
    with pytest.raises(ValueError, match="a folder lies there"):
        save_checkpoint(str(tmp_path / "folder"), state, options=CheckpointOptions(format="full"))
    assert (tmp_path / "folder" / "thesis.tex").exists()
    (tmp_path / "link").symlink_to("folder")
    save_checkpoint(str(tmp_path / "link"), state)  # the link is replaced, what it pointed to stays
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "thesis.tex").exists()


def test_a_kill_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.build("single")
    storage = LocalStorage()
    for survivor in ("both", "old only"):
        folder = tmp_path / survivor.replace(" ", "-")
        saver = Saver()
        saver.save(str(folder / "last"), run.state())
        old = runs.weights(run.module)
        runs.train(run, range(1))
        saver.save(str(folder / "new"), run.state())
        saver.close()
        (folder / "last").rename(folder / ".last.old-0123456789ab")
        if survivor == "both":
            (folder / "new").rename(folder / ".last.tmp-0123456789ab")
            old = runs.weights(run.module)
        (folder / ".half.tmp-0123456789ab").mkdir()
        monkeypatch.setattr(publish, "_recovered", set())  # as a process that starts anew
        assert newest_complete(str(folder)) is not None
        assert (folder / "last").is_dir() and not (folder / ".half.tmp-0123456789ab").exists()
        load_checkpoint(str(folder / "last"), run.state())
        assert runs.same(old, runs.weights(run.module)) == []
        assert [name for name in storage.names(str(folder)) if name.startswith(".")] == []


HOLDER = """
import sys, time
from lightning_pardist.checkpoint import lock
from lightning_pardist.checkpoint.storage import LocalStorage
lock.acquire(LocalStorage(), sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_two_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = runs.build("single").state()
    monkeypatch.setattr(lock, "GRACE_S", 0.3)
    monkeypatch.setattr(lock.acquire, "__kwdefaults__", {"wait_s": 0.3})
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {other.pid} on .* is alive"):
            save_checkpoint(str(tmp_path / "x"), state)
        assert complete_checkpoints(str(tmp_path)) == []  # looking is allowed
    finally:
        other.kill()
        other.wait()
    Saver().save(str(tmp_path / "x"), state)
    lock.release(LocalStorage(), str(tmp_path))
    assert os.listdir(tmp_path) == ["x"]


def test_locks_of_other_hosts_and_reused_process_ids(tmp_path: Path) -> None:
    storage, path = LocalStorage(), tmp_path / lock.NAME
    # The id lives, but the process that has it now started at another time.
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": "another boot:1"}))
    lock.acquire(storage, str(tmp_path), wait_s=0)
    lock.release(storage, str(tmp_path))
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": ""}))
    with pytest.raises(ValueError, match="process 1 on elsewhere"):
        lock.acquire(storage, str(tmp_path), wait_s=0)
    os.utime(path, (time.time() - lock.STALE_S - 1,) * 2)
    lock.acquire(storage, str(tmp_path), wait_s=0)
    lock.release(storage, str(tmp_path))
    assert os.listdir(tmp_path) == []


def lose_a_rank(folder: str) -> str | None:
    """Rank 2 never comes to the second save."""
    run, group = runs.build("fsdp4"), runs.control()
    Saver(CheckpointOptions(), group).save(f"{folder}/a", run.state())
    if runs.world()[0] == 2:
        time.sleep(6)
        return None
    try:
        Saver(CheckpointOptions(timeout_s=3), group).save(f"{folder}/b", run.state())
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_waits_are_bounded(run_distributed: Any, tmp_path: Path) -> None:
    started = time.monotonic()
    texts = run_distributed(lose_a_rank, str(tmp_path), world_size=4)
    assert time.monotonic() - started < 90
    assert "rank 2 did not answer" in texts[0]
    assert all(text and text != "no error" for text in (texts[0], texts[1], texts[3]))
    assert [name for name in os.listdir(tmp_path) if name != lock.NAME] == ["a"]
