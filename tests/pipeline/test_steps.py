"""What users see of a pipeline: outputs, callbacks, predictions, errors, random numbers, other entries."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.strategies.hybrid import HybridStrategy
from tests.bad_input.common import check, four_parts
from tests.pipeline.modules import IdleBlock
from tests.strategies.common import FEATURES, Block, Tower, loader, make_trainer, weights

TWO: dict[str, Any] = {"pipeline_parallel_size": 2}


class Seeing(Tower):
    """Returns outputs, keeps a metric of its own, logs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.error = torchmetrics.MeanAbsoluteError()
        self.in_hook: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", out.detach().max(), reduce_fx="max")
        self.log("rows", float(len(out)), reduce_fx="sum", on_epoch=True)
        return {"loss": loss, "out": out, "count": len(out), "word": "same"}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.error.update(out, batch[1])
        self.log("val_error", self.error, on_epoch=True)
        self.log("val_loss", F.mse_loss(out, batch[1]), sync_dist=True)
        return out

    def on_validation_epoch_end(self) -> None:
        self.in_hook.append(float(self.error.compute()))


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append({k: v.detach().tolist() if isinstance(v, Tensor) else v for k, v in outputs.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs.tolist())


def everything(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module, outputs = Seeing(), Outputs()
    stopping = EarlyStopping("val_error", patience=0, min_delta=10.0)
    # Plain Lightning cannot use a metric in training after it was updated under inference_mode.
    options: dict[str, Any] = {"max_epochs": 9, "callbacks": [outputs, stopping], "inference_mode": False}
    trainer = make_trainer(layout, world_size, **options)
    pipelines = world_size // (layout or {}).get("pipeline_parallel_size", 1)
    before = trainer.validate(module, loader(22, 8, seed=1), verbose=False)
    trainer.fit(module, loader(38, 8 // pipelines), loader(22, 8 // pipelines, seed=1))
    logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
    tested = trainer.test(module, loader(20, 4, seed=2), verbose=False)
    predicted = [part.tolist() for part in trainer.predict(module, loader(21, 5, seed=3)) or []]
    epochs, hooks = trainer.current_epoch, module.in_hook
    return {"outputs": outputs.seen, "logged": logged, "tested": tested, "before": before, "predicted": predicted,
            "epochs": epochs, "hooks": hooks}  # fmt: skip


def near(got: Any, want: Any, path: str = "") -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys(), path
        for key in want:
            near(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), (path, got, want)
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            near(a, b, f"{path}.{index}")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6), path
    else:
        assert got == want, path


def test_every_rank_sees_what_one_process_sees(run_distributed: Any, run_single: Any) -> None:
    want = run_single(everything, None, 1)
    v_shaped = {**TWO, "pipeline": PipelineOptions(schedule="zbv_zero_bubble")}
    for layout in (TWO, v_shaped):
        for got in run_distributed(everything, layout, 2, world_size=2):
            near(got, want)


def gathered(layout: dict[str, Any], world_size: int) -> Any:
    torch.manual_seed(0)
    sample = [torch.zeros(4, FEATURES), torch.zeros(4)]
    trainer = make_trainer({**layout, "gather_predictions": True, "sample_batch": sample}, world_size)
    module = Seeing()
    return torch.cat(trainer.predict(module, loader(21, 5, seed=3)) or []).tolist()


def alone() -> Any:
    torch.manual_seed(0)
    return torch.cat(make_trainer(None, 1).predict(Seeing(), loader(21, 5, seed=3)) or []).tolist()


def test_predictions_come_once_and_in_order(run_distributed: Any, run_single: Any) -> None:
    want = run_single(alone)
    for got in run_distributed(gathered, {**TWO, "data_parallel_shard_size": 2}, 4, world_size=4):
        near(got, want)


# ---- errors


class Failing(Tower):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0
        self.blocks = nn.ModuleList([FailingBlock(self) for _ in range(4)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        if self.where == "loss" and bool((batch[0][:, 0] == 3).any()):
            raise KeyError("of the user")
        if self.where == "backward":
            loss = Broken.apply(loss)
        return loss


class FailingBlock(Block):
    def __init__(self, owner: Failing) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: Tensor) -> Tensor:
        if self.owner[0].where == "block" and self is self.owner[0].blocks[0]:
            self.owner[0].calls += 1
            if self.owner[0].calls == 6:
                raise ArithmeticError("of the user's block")
        return super().forward(x)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if type(gradient) is Tensor:  # not on fake tensors
            raise OSError("of the user's backward")
        return gradient


def rows_with_a_bad_one() -> DataLoader[Any]:
    x = torch.zeros(16, FEATURES)
    x[5, 0] = 3.0
    return DataLoader(TensorDataset(x, torch.zeros(16)), batch_size=8)


def failing(where: str, schedule: str, layout: dict[str, Any], world_size: int) -> Any:
    torch.manual_seed(0)
    options = PipelineOptions(schedule=schedule, num_microbatches=8)
    trainer = make_trainer({**layout, "pipeline": options}, world_size, num_sanity_val_steps=0)
    sample = [torch.zeros(8, FEATURES), torch.zeros(8)]
    trainer.strategy._sample_batch = sample
    start = time.monotonic()
    try:
        trainer.fit(Failing(where), rows_with_a_bad_one())
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("it did not fail")


def test_an_error_on_one_stage_is_raised_on_all_ranks(run_distributed: Any) -> None:
    wanted = {
        "loss": r"stage 1 failed in micro-batch 5 (forward): KeyError: 'of the user'",
        "block": r"stage 0 failed in micro-batch 5 (forward): ArithmeticError: of the user's block",
        "backward": r"stage 1 failed in micro-batch 0 (backward): OSError: of the user's backward",
    }
    for where, text in wanted.items():
        results = run_distributed(failing, where, "1f1b", TWO, 2, world_size=2)
        assert {result[0] for result in results} == {f"training_step: {text}"}
        assert max(result[1] for result in results) < 30
    results = run_distributed(failing, "loss", "gpipe", {**TWO, "data_parallel_shard_size": 2}, 4, world_size=4)
    assert len({result[0] for result in results}) == 1
    assert "KeyError: 'of the user'" in results[3][0]


class Manual(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ValueBranch(Tower):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            if x.mean() > 0:
                x = block(x)
        return self.out(x).squeeze(-1)


class Ragged(Tower):
    """Cuts its input by its values: the shape of what crosses the cut is not that of another batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x[:, : int(x.abs().sum() * 0) + FEATURES])
        for block in self.blocks:
            x = block(x)
        return self.out(x).squeeze(-1)


class NoStack(Tower):
    """Its layers are alike, and in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = self.blocks
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.third(self.second(self.first(self.inp(x))))).squeeze(-1)


def fit(module: L.LightningModule, options: dict[str, Any], rows: int = 8, **arguments: Any) -> None:
    layout = {**TWO, "pipeline": PipelineOptions(**options), **arguments}
    make_trainer(layout, 2, max_steps=1, num_sanity_val_steps=0).fit(module, loader(16, rows))


def fit_named(name: str, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    classes = {"manual": Manual, "branch": ValueBranch, "tower": Tower, "four": Seeing, "no stack": NoStack}
    fit(classes[name](), options, **arguments)


class Again(Tower):
    """Calls its blocks a second time when it validates: at once, after a look at values, or backwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.how == "backwards":
            x = self.inp(batch[0])
            for block in reversed(self.blocks):
                x = block(x)
            self.log("val", self.out(x).mean())
            return
        first = self(batch[0])
        if self.how == "twice" or first.mean().item() < 1e9:
            self.log("val", (self(2 * batch[0]) - first).mean())


def validate_again(how: str) -> None:
    trainer = make_trainer({**TWO, "sample_batch": [torch.zeros(8, FEATURES), torch.zeros(8)]}, 2, max_steps=1)
    trainer.validate(Again(how), loader(16, 8), verbose=False)


def test_a_step_that_calls_blocks_otherwise_than_training_is_refused(run_distributed: Any) -> None:
    check(
        run_distributed,
        [
            (validate_again, ("twice",), r"calls blocks\.0 2 times"),
            (validate_again, ("backwards",), r"calls blocks\.\d, of stage 0, after blocks of stage 1"),
        ],
    )
    for error in run_distributed.errors(validate_again, "twice, by a value", world_size=2):
        assert "was called twice in this step" in str(error)


class Late(L.Callback):
    """From the second batch on all blocks are called."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.idle = () if batch_idx else pl_module.idle


def call_late() -> None:
    module = IdleBlock()
    make_trainer(TWO, 2, callbacks=[Late()]).fit(module, DataLoader(module.dataset(24, seed=1), batch_size=8))


def test_a_block_that_the_described_step_did_not_call_is_not_called_later(run_distributed: Any) -> None:
    for error in run_distributed.errors(call_late, world_size=2):
        assert "a call of blocks.2, which the described step did not call" in str(error)


def fit_scaled() -> None:
    strategy = HybridStrategy(**TWO)
    L.Trainer(
        strategy=strategy, plugins=[MixedPrecision("16-mixed", "cpu")], accelerator="cpu", devices=2, logger=False
    )


def outside(entry: str, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    module = Tower()
    trainer = make_trainer(TWO, 2, max_steps=1)
    trainer.fit(module, loader(16, 8))
    module(torch.zeros(2, FEATURES))


@pytest.mark.filterwarnings("ignore:.*could not be run on fake tensors")
def test_what_cannot_be_run_is_refused_on_all_ranks(run_distributed: Any, tmp_path: Path) -> None:
    short = tmp_path / "short.csv"
    short.write_text("0F0,0B0\n")
    check(
        run_distributed,
        [
            (fit_named, ("manual", {}, {}), "automatic_optimization=False"),
            (fit_named, ("branch", {}, {}), "decides by"),
            (fit_named, ("no stack", {}, {}), "NoStack has no stack of like blocks"),
            (fit_named, ("tower", {}, {"rows": 1}), r"1 row\(s\) per batch, schedule=1f1b"),
            (fit_named, ("four", {"schedule": "dualpipev"}, {"rows": 2}), r"2 row\(s\) per batch, schedule=dualpipev"),
            (fit_named, ("tower", {"schedule": "zbv_zero_bubble"}, {}), r"3 block\(s\) for 4 stage"),
            (fit_named, ("tower", {"split": [3, 1]}, {}), "4 block"),
            (fit_named, ("tower", {"schedule": str(short)}, {}), r"1 row\(s\)"),
            (fit_named, ("tower", {"schedule": str(tmp_path / "no.csv")}, {}), "No such file"),
            (fit_named, ("tower", {}, {"cpu_offload": True}), "cpu_offload=True"),
            (fit_named, ("tower", {"loss_weight": "tokens"}, {}), "labels='labels'"),
        ],
    )
    check(run_distributed, [(fit_scaled, (), "16-mixed")], kind=MisconfigurationException)
    texts = run_distributed.errors(outside, "", {}, {}, world_size=2)
    for error in texts:
        assert isinstance(error, RuntimeError)
        assert "lives on pipeline rank" in four_parts(str(error))


# ---- numbers that micro-batches could change


class Tokens(Tower):
    """A mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x), batch[1], ignore_index=-100)


def token_means(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Tokens()
    x, y = torch.randn(16, FEATURES), torch.arange(16) % 5
    y[torch.tensor([1, 2, 3, 5, 9])] = -100
    trainer = make_trainer(layout, world_size, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return weights(module)


def test_losses_can_be_weighted_by_the_labels_that_count(run_distributed: Any, run_single: Any) -> None:
    want = run_single(token_means, None, 1)
    options = PipelineOptions(loss_weight="tokens", labels="1", num_microbatches=4)
    for got in run_distributed(token_means, {**TWO, "pipeline": options}, 2, world_size=2):
        held = {name: value for name, value in got.items() if not value.isnan().all()}
        assert len(held) > 5
        for name, value in held.items():
            torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)


class Contrastive(Tower):
    """Every row is compared with all others of its batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.inp(batch[0])
        for block in self.blocks:
            x = block(x)
        scores = F.normalize(x, dim=-1) @ F.normalize(batch[0], dim=-1).T
        loss = F.cross_entropy(5 * scores, torch.arange(len(x)))
        self.log("loss", loss)
        return loss


def contrasted(layout: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(0)
    module = Contrastive()
    trainer = make_trainer(layout, world_size, max_steps=3, num_sanity_val_steps=0)
    trainer.fit(module, loader(24, 8))
    plan = None if layout is None else trainer.strategy.plan.pipeline
    return weights(module), float(trainer.callback_metrics["loss"]), () if plan is None else plan.notes


def test_a_step_that_needs_the_whole_batch_runs_as_one_micro_batch(run_distributed: Any, run_single: Any) -> None:
    want, loss, _ = run_single(contrasted, None, 1)
    layout = {**TWO, "pipeline": PipelineOptions(num_microbatches=1)}
    results = run_distributed(contrasted, layout, 2, world_size=2)
    for name, value in merge([held for held, _, _ in results]).items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)
    for _, found, notes in results:
        assert found == pytest.approx(loss, rel=1e-5)
        assert "the step sees the whole batch at once, and ranks wait 50 % of the time" in notes[-1]


class Dropping(Tower):
    """Dropout before, between, inside and after the blocks; the first mask is used once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = start = F.dropout(self.inp(x), 0.4, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        self.agreement = (start == 0).float().mean()
        return self.out(x + start).squeeze(-1)


def dropped(layout: dict[str, Any], world_size: int) -> Any:
    L.seed_everything(3, verbose=False)
    module = Dropping()
    trainer = make_trainer(layout, world_size, max_steps=3)
    trainer.fit(module, loader(48, 8))
    return weights(module)


def test_random_numbers_are_the_same_whatever_the_stages(run_distributed: Any) -> None:
    options = PipelineOptions(num_microbatches=4)
    two, again = (run_distributed(dropped, {**TWO, "pipeline": options}, 2, world_size=2) for _ in range(2))
    four = run_distributed(dropped, {"pipeline_parallel_size": 4, "pipeline": options}, 4, world_size=4)
    merged = [merge(results) for results in (two, again, four)]
    for other in merged[1:]:
        for name, value in merged[0].items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-7)


def merge(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all stages hold together; where several do, they agree."""
    found: dict[str, Tensor] = {}
    for part in results:
        for name, value in part.items():
            if value.isnan().all():
                continue
            if name in found:
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)
            found[name] = value
    assert found.keys() == results[0].keys()
    return found


def timed(path: str) -> float:
    torch.manual_seed(0)
    options = PipelineOptions(timeline=path, num_microbatches=4)
    trainer = make_trainer({**TWO, "pipeline": options}, 2, max_steps=4)
    trainer.fit(Seeing(), loader(48, 8))
    assert trainer.strategy.plan is not None and trainer.strategy.plan.pipeline is not None
    return trainer.strategy.plan.pipeline.idle_share


def test_the_timeline_of_a_step_is_written(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(timed, str(tmp_path / "step.json"), world_size=2)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} == {f"{s}{k}{m}" for s in (0, 1) for k in "FB" for m in range(4)}
    run_distributed(timed, str(tmp_path / "step.html"), world_size=2)
    page = (tmp_path / "step.html").read_text()
    assert page.count("<rect") == 16 and "foretold" in page


def test_batches_of_any_structure_are_cut_by_rows() -> None:
    from lightning_pardist.run.microbatches import batch_rows, even_sizes, merge_outputs, split_batch

    batch = {"x": torch.arange(10).view(5, 2), "names": list("abcde"), "mask": torch.ones(2, 2), "none": None,
             "pair": [torch.arange(5), torch.arange(5.0)], "boxes": [torch.ones(i, 4) for i in range(5)]}  # fmt: skip
    sizes = even_sizes(5, 3)
    assert sizes == [2, 2, 1] and batch_rows(batch) == 5
    parts = split_batch(batch, sizes)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert parts[2]["pair"][0].tolist() == [4] and parts[1]["mask"].shape == (2, 2) and parts[0]["none"] is None
    assert [box.shape[0] for box in parts[1]["boxes"]] == [2, 3]
    outputs = [{"loss": torch.tensor(float(i)), "x": part["x"], "names": part["names"]} for i, part in enumerate(parts)]
    merged = merge_outputs(outputs, sizes, [0.4, 0.4, 0.2])
    assert float(merged["loss"]) == pytest.approx(0.8) and torch.equal(merged["x"], batch["x"])
    assert merged["names"] == batch["names"]
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2)])
    with pytest.raises(ValueError, match="PackedSequence"):
        split_batch(packed, [1, 1])


class SometimesNaN(Seeing):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.skips_itself and bool(batch[0].isnan().any()):
            return None
        return output

    skips_itself = False


def with_a_bad_batch(layout: dict[str, Any] | None, world_size: int, accumulate: int, bad: bool) -> Any:
    torch.manual_seed(0)
    x = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(3))
    y = x.sum(-1).tanh()
    if bad:
        x[8:16] = float("nan")
    else:
        x, y = torch.cat([x[:8], x[16:]]), torch.cat([y[:8], y[16:]])
    trainer = make_trainer(layout, world_size, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    module = SometimesNaN()
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    return weights(module)


def test_a_batch_that_all_agree_to_drop_leaves_no_trace(run_distributed: Any, run_single: Any) -> None:
    want = run_single(with_a_bad_batch, None, 1, 1, False)
    sample = [torch.zeros(8, FEATURES), torch.zeros(8)]
    layout = {**TWO, "on_nonfinite_loss": "skip", "sample_batch": sample}
    for other, size in ((layout, 2), ({**layout, "data_parallel_shard_size": 2, "pipeline_parallel_size": 2}, 4)):
        results = run_distributed(with_a_bad_batch, other, size, 1, True, world_size=size)
        if size == 2:
            for name, value in merge(results).items():
                torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-6)
        else:  # other batches: only that nothing became NaN
            assert all(len(result) == len(want) for result in results)
