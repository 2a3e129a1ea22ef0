"""Loading what does not quite fit: damage, other models, other optimizers, partial and untrusted content."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pardist.checkpoint import (
    CheckpointError,
    CorruptCheckpointError,
    LoadRequest,
    Saver,
    TrainState,
    complete_checkpoints,
    load_checkpoint,
    read_rank_states,
    save_checkpoint,
    verify,
)
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = runs.build("single")
    runs.train(run, range(2))
    saver = Saver()
    for name in ("older", "newer"):
        saver.save(str(tmp_path / name), run.state())
    saver.close()
    return tmp_path


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def _damage(folder: Path, how: str) -> None:
    data = next(folder.glob("*.distcp"))
    if how == "flipped byte":
        _flip(data, data.stat().st_size // 2)
    elif how == "missing file":
        data.unlink()
    elif how == "cut off":
        data.write_bytes(data.read_bytes()[:-10])
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "half a manifest":
        text = (folder / "manifest.json").read_bytes()
        (folder / "manifest.json").write_bytes(text[: len(text) // 2])
    elif how == "altered manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))
    else:
        _flip(folder / how, (folder / how).stat().st_size // 2)


@pytest.mark.parametrize(
    ("how", "text", "seen_when_choosing"),
    [
        ("flipped byte", r"__0_0\.distcp differs", False),
        ("missing file", r"__0_0\.distcp is missing", True),
        ("cut off", r"__0_0\.distcp has \d+ bytes instead of", True),
        ("no manifest", r"manifest\.json", True),
        ("half a manifest", r"manifest\.json", True),
        ("altered manifest", "its checksum does not match", True),
        (".metadata", r"\.metadata differs", False),
        ("trainer.pt", r"trainer\.pt differs", False),
        ("objects.pt", r"objects\.pt differs", False),
    ],
)
def test_damage_is_refused_by_name(saved: Path, how: str, text: str, seen_when_choosing: bool) -> None:
    newer, older = str(saved / "newer"), str(saved / "older")
    assert complete_checkpoints(str(saved)) == [newer, older]
    _damage(saved / "newer", how)
    run = runs.build("single")
    before = runs.weights(run.module)
    with pytest.raises(CorruptCheckpointError, match=text):
        load_checkpoint(newer, run.state())
    assert runs.same(before, runs.weights(run.module)) == []
    with pytest.raises(CorruptCheckpointError, match=text):
        verify(newer)
    assert complete_checkpoints(str(saved)) == ([older] if seen_when_choosing else [newer, older])
    assert verify(older) > 0


def test_newer_format_version(saved: Path) -> None:
    path = saved / "newer" / "manifest.json"
    content = json.loads(path.read_text())
    content["format_version"] = 99
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"format version 99; this package reads up to 1") as caught:
        load_checkpoint(str(saved / "newer"), runs.build("single").state())
    assert not isinstance(caught.value, CorruptCheckpointError)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("pwned"),))


def test_a_forged_description_runs_no_code(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (saved / "newer" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CorruptCheckpointError):
        load_checkpoint(
            str(saved / "newer"), runs.build("single").state(), options=CheckpointOptions(verify_on_load="off")
        )
    assert not (tmp_path / "pwned").exists()


def test_not_a_checkpoint(tmp_path: Path) -> None:
    state = runs.build("single").state()
    with pytest.raises(FileNotFoundError, match="nothing lies there"):
        load_checkpoint(str(tmp_path / "x"), state)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"a folder with notes\.txt"):
        load_checkpoint(str(tmp_path / "x"), state)
    (tmp_path / "y.ckpt").write_bytes(b"nonsense")
    with pytest.raises(CorruptCheckpointError, match=r"y\.ckpt"):
        load_checkpoint(str(tmp_path / "y.ckpt"), state)


def load_other_model(path: str, width: int, strict: bool) -> None:
    run, group = runs.build("fsdp4", width=width), runs.control()
    options = CheckpointOptions(timeout_s=120)
    load_checkpoint(path, run.state(), LoadRequest(strict=strict), options=options, control_group=group)


def test_checkpoint_of_another_model(saved: Path, run_distributed: Any) -> None:
    errors = run_distributed.errors(load_other_model, str(saved / "newer"), 8, False, world_size=4)
    text = r"the first that differs is emb\.weight: \(11, 6\) in the checkpoint, \(11, 8\) in the module"
    for error in errors:
        assert isinstance(error, ValueError)
        assert error.args == errors[0].args
    with pytest.raises(ValueError, match=text):
        raise errors[0]


def _extended(run: runs.Run) -> runs.Run:
    run.module.adapter = nn.Linear(2, 2)
    del run.module.blocks[1].gain
    run.optimizers[0].add_param_group({"params": list(run.module.adapter.parameters()), "lr": 0.5})
    return run


def test_partial_loads(saved: Path) -> None:
    run = _extended(runs.build("single"))
    kept = run.module.adapter.weight.detach().clone()
    with pytest.raises(ValueError, match=r"missing in the checkpoint: adapter\.weight, adapter\.bias") as caught:
        load_checkpoint(str(saved / "newer"), run.state())
    assert "unexpected in it: blocks.1.gain" in str(caught.value)
    report = load_checkpoint(str(saved / "newer"), run.state(), LoadRequest(strict=False))
    assert report.missing == ["adapter.weight", "adapter.bias"] and report.unexpected == ["blocks.1.gain"]
    assert any("adapter.weight" in note for note in report.notes)
    assert torch.equal(kept, run.module.adapter.weight)
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.005, 0.01, 0.5]
    assert len(run.optimizers[0].state) > 0


def test_weights_alone(saved: Path) -> None:
    run = _extended(runs.build("single"))
    report = load_checkpoint(str(saved / "newer"), run.state(), LoadRequest(what="weights", strict=False))
    assert run.optimizers[0].state == {} and run.optimizers[0].param_groups[0]["lr"] == 0.01
    assert report.trainer["lr_schedulers"][0]["last_epoch"] == 2


def test_groups_that_do_not_correspond(saved: Path) -> None:
    run = runs.build("single")
    joined = [torch.optim.AdamW(run.module.parameters(), lr=0.3)]
    with pytest.raises(ValueError, match=r"optimizer 0 \(AdamW\): group 0 joins"):
        load_checkpoint(str(saved / "newer"), TrainState(run.module, joined))
    fewer = [torch.optim.AdamW(run.module.blocks[0].parameters(), lr=0.3)]
    fewer[0].param_groups[0]["params"] = [p for p in fewer[0].param_groups[0]["params"] if p.dim() > 1]
    with pytest.raises(ValueError, match=r"no longer has blocks\.0\.down\.bias"):
        load_checkpoint(str(saved / "newer"), TrainState(run.module, fewer))
    with pytest.raises(ValueError, match="1 optimizers are saved, 2 are live"):
        load_checkpoint(str(saved / "newer"), TrainState(run.module, [*joined, *joined]))


def test_group_options_and_empty_groups(tmp_path: Path) -> None:
    def build(lr: float) -> runs.Run:
        torch.manual_seed(0)
        module = nn.Linear(2, 2)
        groups = [{"params": [module.weight]}, {"params": [], "lr": lr}, {"params": [module.bias], "lr": lr, "tag": lr}]
        return runs.Run(module, module, [torch.optim.Adam(groups, lr=lr)])

    run = build(0.1)
    run.optimizers[0].param_groups[0]["initial_lr"] = 0.7
    run.optimizers[0].param_groups[1]["lr"] = 0.9
    save_checkpoint(str(tmp_path / "x"), run.state())
    other = build(0.2)
    identities = [id(group) for group in other.optimizers[0].param_groups]
    load_checkpoint(str(tmp_path / "x"), other.state())
    assert [id(group) for group in other.optimizers[0].param_groups] == identities
    for ours, theirs in zip(run.optimizers[0].param_groups, other.optimizers[0].param_groups):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def optimizers(layout: str, folder: str, kind: str, dtype: torch.dtype) -> bool:
    """One kind of optimizer there and back, before its first step and after two, frozen parameters included."""
    group = runs.control()
    for steps in (0, 2):
        run = runs.build(layout, optimizer=kind, dtype=dtype)
        runs.train(run, range(steps))
        run.module.blocks[1].up.weight.requires_grad_(False)  # frozen between save and load: its state survives
        options = CheckpointOptions(timeout_s=120)
        save_checkpoint(f"{folder}/{layout}-{steps}", run.state(), options=options, control_group=group)
        other = runs.build(layout, optimizer=kind, dtype=dtype)
        runs.train(other, range(3))
        load_checkpoint(f"{folder}/{layout}-{steps}", other.state(), control_group=group)
        assert runs.same(runs.weights(run.module), runs.weights(other.module)) == []
        assert runs.same(runs.optimizer_state(run), runs.optimizer_state(other)) == []
    return True


@pytest.mark.parametrize(
    ("kind", "dtype"), [("sgd", torch.float32), ("momentum", torch.bfloat16), ("adamw", torch.bfloat16)]
)
def test_kinds_of_optimizers(run_distributed: Any, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    assert optimizers("single", str(tmp_path), kind, dtype)
    run_distributed(optimizers, "fsdp4", str(tmp_path), kind, dtype, world_size=4)


@dataclass
class Settings:
    depth: int = 3


def test_pickled_objects(tmp_path: Path) -> None:
    run = runs.build("single")
    state = TrainState(run.module, run.optimizers, {"hyper_parameters": {"settings": Settings()}, "epoch": 4})
    for kind in ("sharded", "full"):
        path = str(tmp_path / f"{kind}.ckpt")
        save_checkpoint(path, state, options=CheckpointOptions(format=kind))
        with pytest.raises(ValueError, match=rf"(?s)hyper_parameters: {__name__}\.Settings.*add_safe_globals"):
            load_checkpoint(path, run.state())
        trusted = load_checkpoint(path, run.state(), LoadRequest(weights_only=False))
        assert trusted.trainer["hyper_parameters"]["settings"] == Settings()
        with torch.serialization.safe_globals([Settings]):
            assert load_checkpoint(path, run.state()).trainer["epoch"] == 4


def test_rank_states_of_another_layout(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(save_rank_states, str(tmp_path), world_size=2)
    assert read_rank_states(str(tmp_path / "x")) == [{"seen": 0}, {"seen": 10}]
    report = load_checkpoint(str(tmp_path / "x"), runs.build("single").state(), LoadRequest(layout={"ddp": 1}))
    assert report.rank_state is None and not report.same_layout


def save_rank_states(folder: str) -> None:
    run = runs.build("ddp2")
    save_checkpoint(f"{folder}/x", run.state(rank_state={"seen": 10 * runs.world()[0]}), control_group=runs.control())


def test_a_module_whose_state_is_copied_or_no_tensor(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in super().state_dict(*args, **kwargs).items()
            }

    module, other = Odd(), Odd()
    module.count = 7
    for kind in ("sharded", "full"):
        path = str(tmp_path / f"{kind}.ckpt")
        save_checkpoint(path, TrainState(module), options=CheckpointOptions(format=kind))
        other.count = 0
        load_checkpoint(path, TrainState(other))
        assert other.count == 7 and torch.equal(module.linear.weight, other.linear.weight)


def test_names_have_no_wrapper_parts(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = nn.Sequential(torch.compile(module[0], backend="eager"), module[1])
    wrapped = nn.ModuleDict({"net": nn.parallel.DataParallel(compiled), "module": nn.Linear(1, 1)})
    save_checkpoint(str(tmp_path / "x"), TrainState(wrapped))
    plain = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "module": nn.Linear(1, 1)})
    load_checkpoint(str(tmp_path / "x"), TrainState(plain))
    assert torch.equal(plain["net"][0].weight, module[0].weight)
    assert torch.equal(plain["module"].weight, wrapped["module"].weight)


def test_tied_here_untied_there(tmp_path: Path) -> None:
    run = runs.build("single")
    save_checkpoint(str(tmp_path / "tied"), TrainState(run.module))
    untied = runs.build("single").module
    untied.head.weight = nn.Parameter(torch.zeros(runs.VOCABULARY, runs.WIDTH))
    load_checkpoint(str(tmp_path / "tied"), TrainState(untied))
    assert torch.equal(untied.head.weight, run.module.emb.weight)
    assert torch.equal(untied.emb.weight, run.module.emb.weight)
    save_checkpoint(str(tmp_path / "untied"), TrainState(untied))
    tied = runs.build("single").module
    load_checkpoint(str(tmp_path / "untied"), TrainState(tied))
    assert tied.head.weight is tied.emb.weight and torch.equal(tied.emb.weight, run.module.emb.weight)
