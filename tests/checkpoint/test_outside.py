"""Checkpoints out of and into the rest of the world: Lightning, Hugging Face, remote storage, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from lightning_pardist.checkpoint import (
    CorruptCheckpointError,
    LoadRequest,
    SaveInfo,
    Saver,
    TrainState,
    complete_checkpoints,
    consolidate,
    export,
    inspect,
    load_checkpoint,
    load_weights,
    newest_complete,
    save_checkpoint,
    verify,
)
from lightning_pardist.cli.main import main
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip


class Lit(LightningModule):
    def __init__(self, width: int = runs.WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(5)
        self.model = runs.Model(width)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.cat([runs.batch(step) for step in range(3)]), batch_size=runs.BATCH)


def _trained(folder: Path, epochs: int = 2) -> tuple[Lit, Path]:
    module = Lit()
    trainer = Trainer(max_epochs=epochs, default_root_dir=folder, **QUIET)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "plain.ckpt")
    return module, folder / "plain.ckpt"


def test_lightning_resumes_from_a_consolidated_checkpoint(tmp_path: Path) -> None:
    module, plain = _trained(tmp_path)
    checkpoint = torch.load(plain, weights_only=True)
    state = TrainState(
        module,
        [module.optimizers().optimizer],
        {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")},
    )
    save_checkpoint(str(tmp_path / "sharded"), state)
    consolidate(str(tmp_path / "sharded"), str(tmp_path / "out.ckpt"))

    ours = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert set(ours) == {*checkpoint, "lightning_pardist"}
    assert runs.same(checkpoint["state_dict"], ours["state_dict"]) == []
    assert ours["state_dict"]["model.emb.weight"].data_ptr() == ours["state_dict"]["model.head.weight"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "out.ckpt").testzip() is None

    losses = []
    for path in (plain, tmp_path / "out.ckpt"):
        fresh = Lit()
        Trainer(max_epochs=3, default_root_dir=tmp_path, **QUIET).fit(fresh, ckpt_path=path, weights_only=True)
        losses.append(fresh.losses)
    assert len(losses[0]) == 3 and losses[0] == losses[1]


ELSEWHERE = """
import sys
sys.modules["lightning_pardist"] = None  # importing it is an error from here on
import torch
from lightning.pytorch import LightningModule

class Lit(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(width, 3)

module = Lit.load_from_checkpoint(sys.argv[1], weights_only=True)
print(module.hparams.width, float(module.model.weight.sum()))
"""


class Small(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(width, 3)


def test_load_from_checkpoint_where_this_package_is_absent(tmp_path: Path) -> None:
    module = Small(4)
    trainer = {
        "hyper_parameters": dict(module.hparams), "hparams_name": "kwargs",
        "pytorch-lightning_version": "2.6.6", "loops": {}, "epoch": 0, "global_step": 0,
    }  # fmt: skip
    save_checkpoint(str(tmp_path / "sharded"), TrainState(module, trainer=trainer))
    save_checkpoint(
        str(tmp_path / "full.ckpt"), TrainState(module, trainer=trainer), options=CheckpointOptions(format="full")
    )
    consolidate(str(tmp_path / "sharded"), str(tmp_path / "out.ckpt"))
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    for name in ("full.ckpt", "out.ckpt"):
        done = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, str(tmp_path / name)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["4", str(float(module.model.weight.sum()))]


def test_resume_from_a_plain_lightning_file(tmp_path: Path) -> None:
    module, plain = _trained(tmp_path)
    other = Lit()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    report = load_checkpoint(str(plain), TrainState(other, [optimizer]))
    assert runs.same(runs.weights(module), runs.weights(other)) == []
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.25
    assert float(optimizer.state[other.model.emb.weight]["step"]) == 6
    assert report.trainer["epoch"] == 2 and "state_dict" not in report.trainer


def load_foreign(paths: dict[str, str]) -> dict[str, Any]:
    group, out = runs.control(), {}
    for kind, path in paths.items():
        module = runs.build("fsdp4").module
        prefix = "backbone." if kind == "prefixed" else ""
        target = torch.nn.ModuleDict({"backbone": module}) if prefix else module
        report = load_weights(
            path,
            target,
            prefix=prefix,
            strict=kind != "bare",
            options=CheckpointOptions(timeout_s=120),
            control_group=group,
        )
        out[kind] = (report.kind, runs.weights(module))
    return out


def test_weights_from_elsewhere(run_distributed: Any, tmp_path: Path) -> None:
    module = runs.build("single").module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter))
    state = module.state_dict()
    untied = {name: value.clone() for name, value in state.items() if name != "head.weight"}
    torch.save(
        {"state_dict": {f"blocks.{k[7:]}" if k.startswith("blocks") else k: v for k, v in state.items()}},
        tmp_path / "file.ckpt",
    )
    torch.save(state, tmp_path / "bare.pt")
    dcp.save(
        {"state_dict": state, "optimizer_0": {"state": {"x": torch.ones(2)}}},
        checkpoint_id=tmp_path / "lightning",
        no_dist=True,
    )
    torch.save({"epoch": 1}, tmp_path / "lightning" / "meta.pt")
    save_file(untied, tmp_path / "one.safetensors")
    for kind, names in {"folder": sorted(untied), "prefixed": sorted(untied, reverse=True)}.items():
        (tmp_path / kind).mkdir()
        half = len(names) // 2
        shards = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
        for file, part in shards.items():
            save_file({name: untied[name] for name in part}, tmp_path / kind / file)
        weight_map = {name: file for file, part in shards.items() for name in part}
        (tmp_path / kind / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    paths = {
        "file": "file.ckpt",
        "bare": "bare.pt",
        "lightning": "lightning",
        "one": "one.safetensors",
        "folder": "folder",
        "prefixed": "prefixed",
    }
    results = run_distributed(load_foreign, {kind: str(tmp_path / name) for kind, name in paths.items()}, world_size=4)
    for result in results:
        assert [kind for kind, _ in result.values()] == ["File", "File", "LightningFolder", *["Safetensors"] * 3]
        for kind, (_, weights) in result.items():
            assert runs.same(dict(state), weights) == [], kind

    (tmp_path / "folder" / "b.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors is missing"):
        load_weights(str(tmp_path / "folder"), module)
    with pytest.raises(ValueError, match=r"weights without a run \(Safetensors\)"):
        load_checkpoint(str(tmp_path / "one.safetensors"), runs.build("single").state())


def save_fsdp(path: str) -> dict[str, Any]:
    run = runs.build("fsdp4")
    runs.train(run, range(2))
    save_checkpoint(path, run.state(), SaveInfo(2, 0, {"data_parallel_shard": 4}), control_group=runs.control())
    return runs.weights(run.module)


def test_export(run_distributed: Any, tmp_path: Path) -> None:
    weights = run_distributed(save_fsdp, str(tmp_path / "x"), world_size=4)[0]
    weights.pop("head.weight")  # tied: stored once
    names = export(str(tmp_path / "x"), str(tmp_path / "one"))
    assert names == ["model.safetensors"]
    assert runs.same(weights, load_file(tmp_path / "one" / "model.safetensors")) == []
    names = export(str(tmp_path / "x"), str(tmp_path / "many"), dtype="bf16", prefix="blocks.", max_shard_bytes=200)
    index = json.loads((tmp_path / "many" / names[-1]).read_text())
    parts = {k: v for name in names[:-1] for k, v in load_file(tmp_path / "many" / name).items()}
    expected = {k[7:]: v.bfloat16() for k, v in weights.items() if k.startswith("blocks.")}
    assert runs.same(expected, parts) == [] and set(index["weight_map"]) == set(expected) and len(names) > 3
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    with pytest.raises(ValueError, match="must not mix with other weights"):
        export(str(tmp_path / "x"), str(tmp_path / "one"))
    with pytest.raises(ValueError, match="prefix 'nothing'"):
        export(str(tmp_path / "x"), str(tmp_path / "none"), prefix="nothing")


class Holder:
    """An object of a user that hides a tensor: it can only be pickled whole."""

    def __init__(self) -> None:
        self.tensor = torch.arange(5.0)


def test_consolidate_with_tensors_inside_objects(tmp_path: Path) -> None:
    run = runs.build("single")
    runs.train(run, range(1))
    trainer = {"callbacks": {"a": Holder()}, "plain": torch.arange(3), "empty": torch.empty(0)}
    save_checkpoint(str(tmp_path / "x"), TrainState(run.module, run.optimizers, trainer))
    with pytest.raises(ValueError, match=r"callbacks: .*Holder"):
        consolidate(str(tmp_path / "x"), str(tmp_path / "out.ckpt"))
    consolidate(str(tmp_path / "x"), str(tmp_path / "out.ckpt"), weights_only=False)
    content = torch.load(tmp_path / "out.ckpt", weights_only=False)
    assert torch.equal(content["callbacks"]["a"].tensor, torch.arange(5.0)) and content["plain"].tolist() == [0, 1, 2]
    assert runs.same(runs.weights(run.module), content["state_dict"]) == []
    other = runs.build("single")
    load_checkpoint(str(tmp_path / "out.ckpt"), other.state(), LoadRequest(weights_only=False))
    assert runs.same(runs.optimizer_state(run), runs.optimizer_state(other)) == []
    with pytest.raises(ValueError, match="something lies there"):
        consolidate(str(tmp_path / "x"), str(tmp_path / "out.ckpt"))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.build("single")
    runs.train(run, range(1))
    source = str(tmp_path / "x")
    save_checkpoint(source, run.state(), SaveInfo(7, 1, {"data_parallel_shard": 1}))

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(["checkpoint", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    status, out, _ = call("inspect", source, "--tensors")
    assert status == 0 and "step, epoch      7, 1" in out and "blocks.0.up.weight  [7, 6]  torch.float32" in out
    assert "AdamW: 5 parameters, lr 0.01; 10 parameters, lr 0.02" in out and "head.weight = emb.weight" in out
    status, out, _ = call("verify", source)
    assert status == 0 and "are as they were written" in out
    status, out, err = call("consolidate", source, str(tmp_path / "y.ckpt"), "--progress", "true")
    assert status == 0 and "y.ckpt" in out and "consolidate: 100%" in err
    assert (
        call("export", source, str(tmp_path / "z"), "--safetensors", "--dtype", "bf16", "--prefix", "blocks.")[0] == 0
    )
    assert "0.up.weight" in load_file(tmp_path / "z" / "model.safetensors")
    assert call("inspect", str(tmp_path / "y.ckpt"))[0] == call("inspect", str(tmp_path / "z"))[0] == 0
    next(Path(source).glob("*.distcp")).unlink()
    status, _, err = call("verify", source)
    assert status == 1 and "__0_0.distcp is missing" in err and "Traceback" not in err


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_remote_storage(tmp_path: Path, scheme: str) -> None:
    base = "memory://bucket/run" if scheme == "memory" else f"file://{tmp_path}/with%20space"
    run = runs.build("single")
    saver = Saver(CheckpointOptions(storage_options={"skip_instance_cache": True} if scheme == "file" else None))
    for step in range(3):  # the name is used again: the old content counts until the new manifest is there
        runs.train(run, range(step, step + 1))
        saver.save(f"{base}/last", run.state(), SaveInfo(step))
    other = runs.build("single")
    load_checkpoint(f"{base}/last", other.state())
    assert runs.same(runs.weights(run.module), runs.weights(other.module)) == []
    assert runs.same(runs.optimizer_state(run), runs.optimizer_state(other)) == []
    assert verify(f"{base}/last") > 0 and inspect(f"{base}/last").manifest.step == 2
    assert newest_complete(base) is not None and len(complete_checkpoints(base)) == 1
    if scheme == "memory":
        names = fsspec.filesystem("memory").ls("/bucket/run/last", detail=False)
        assert sorted(len(Path(name).name) for name in names) == [len("manifest.json"), len("save-0123456789ab")]
    else:
        assert (tmp_path / "with space" / "last" / "manifest.json").is_file()
    consolidate(f"{base}/last", str(tmp_path / "out.ckpt"))
    export(f"{base}/last", str(tmp_path / "exported"))
    full = Saver(CheckpointOptions(format="full"))
    full.save(f"{base}/full.ckpt", run.state())
    load_checkpoint(f"{base}/full.ckpt", other.state())
    saver.close()
    full.close()


def test_a_remote_save_that_fails_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = runs.build("single"), "memory://bucket/failing/last"
    saver = Saver()
    saver.save(path, run.state())
    before = runs.weights(run.module)
    runs.train(run, range(1))
    monkeypatch.setattr("lightning_pardist.checkpoint.manifest.Manifest.to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saver.save(path, run.state())
    monkeypatch.undo()
    load_checkpoint(path, run.state())
    assert runs.same(before, runs.weights(run.module)) == []
    assert len(fsspec.filesystem("memory").ls("/bucket/failing/last")) == 2
    saver.close()
