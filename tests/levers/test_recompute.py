"""Recomputation changes memory and nothing else: the judges are the same run without it, and one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_pardist import HybridStrategy, RecomputeOptions
from lightning_pardist.plan import format_plan
from lightning_pardist.torch_dtensor_api import local_tensor
from tests.describe.judge import measure
from tests.levers.common import Block, Net, Seen, assert_same_run, data, train
from tests.strategies.common import make_trainer
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(240)
FULL, SELECTIVE = RecomputeOptions(), RecomputeOptions(mode="selective")
SECOND = RecomputeOptions(every=2, blocks=["Block"])
ATTENTION = RecomputeOptions(
    mode="selective", ops=["_scaled_dot_product_flash_attention_for_cpu", "aten.addmm.default"]
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "fsdp": {"zero_stage": 3},
    "zero2 offloaded": {"zero_stage": 2, "cpu_offload": True},
    "fsdp offloaded, units inside blocks": {"zero_stage": 3, "cpu_offload": True, "fsdp_units": ["Block", "*.qkv"]},
}


def _equal(ours: Seen, theirs: Seen, tolerance: float = 0.0) -> None:
    assert_same_run(ours, theirs, tolerance)
    for mine, reference in zip(ours.gradients, theirs.gradients, strict=True):
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(mine[name], value, rtol=tolerance, atol=tolerance, msg=name)


def _with_and_without(layout: dict[str, Any], **options: Any) -> list[Seen]:
    return [
        train({**layout, "recompute": recompute}, partial(Net, dropout=0.2), **options)
        for recompute in (None, FULL, SELECTIVE, SECOND, ATTENTION)
    ]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_with_dropout(run_distributed: WorkerPool, layout: str, precision: str) -> None:
    for rank in run_distributed(_run, LAYOUTS[layout], precision, timeout=150.0):
        plain, *recomputed = rank
        assert plain.losses[0] != plain.losses[-1]
        for other in recomputed:
            _equal(other, plain)


def _run(layout: dict[str, Any], precision: str) -> list[Seen]:
    return _with_and_without(layout, precision=precision, accumulate_grad_batches=2)


def test_one_process_without_dropout_reaches_the_same(
    run_distributed: WorkerPool, run_single: Callable[..., Any]
) -> None:
    reference = run_single(train, None)
    for layout in ({"zero_stage": 0}, {"zero_stage": 3}):
        for recompute in (FULL, SELECTIVE):
            arguments = {**layout, "recompute": recompute}
            for seen in run_distributed(_synchronised, arguments):
                _equal(seen, reference, 2e-5)


def _synchronised(arguments: dict[str, Any]) -> Seen:
    return train(arguments, sync_batchnorm=True)


# ---- bytes ---


class Kept(L.Callback):
    """Bytes that the forward pass of the first step keeps, parameters and buffers left out."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.dtypes: set[str] = set()
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        def own() -> set[int]:
            tensors = (local_tensor(t) for t in (*pl_module.parameters(), *pl_module.buffers()))
            return {t.untyped_storage().data_ptr() for t in tensors}

        sharded = own()

        def pack(tensor: Tensor) -> Tensor:
            address = tensor.untyped_storage().data_ptr()
            if address not in sharded | own():  # gathered parameters are registered while their block runs
                self.tensors.setdefault(address, tensor)
            return tensor

        for block in pl_module.blocks:
            block.out.register_forward_hook(lambda module, args, out: self.dtypes.add(str(out.dtype)))
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self._stack.close()


def _measured(layout: dict[str, Any], recompute: RecomputeOptions, precision: str) -> tuple[int, int, str, set[str]]:
    """Returns what a real step keeps, what the plan says, its text, and the dtypes that blocks compute in."""
    kept = Kept()
    options: dict[str, Any] = {"max_steps": 1, "precision": precision, "num_sanity_val_steps": 0, "callbacks": [kept]}
    trainer = make_trainer({**layout, "recompute": recompute}, 2, **options)
    # torch's fake kernel gives the saved statistics of a batch norm in bfloat16, the real one in float32.
    trainer.fit(Net(batch_norm=False), data())
    real = sum(t.untyped_storage().nbytes() for t in kept.tensors.values())
    assert isinstance(trainer.strategy, HybridStrategy)
    plan = trainer.strategy.plan
    assert plan is not None and plan.recompute.saved_bytes is not None
    return real, plan.recompute.saved_bytes, format_plan(plan), kept.dtypes


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_the_plan_foretells_the_bytes_that_remain(run_distributed: WorkerPool, layout: str, precision: str) -> None:
    remaining = []
    for recompute in (FULL, SECOND):
        for real, planned, text, dtypes in run_distributed(_measured, LAYOUTS[layout], recompute, precision):
            assert planned == pytest.approx(real, rel=0.01)
            assert f"{len(Net().blocks) // recompute.every} of 4" in text
            assert dtypes == {"torch.float32" if precision == "32-true" else "torch.bfloat16"}
        remaining.append(planned)
    assert remaining[0] < remaining[1]


def test_selective_keeps_the_named_results_too() -> None:
    """torch keeps them beside autograd, so no hook sees them: counted by hand."""
    from lightning_pardist.base.recomputing import resolve_ops
    from lightning_pardist.describe import profile_model
    from lightning_pardist.describe.levers import Conditions, profile_under

    module, batch = Net(), next(iter(data()))
    blocks = [block.name for block in profile_model(module, batch).blocks()]
    nothing, _ = profile_under(module, batch, Conditions(recomputed=blocks))
    kept, hits = profile_under(module, batch, Conditions(recomputed=blocks, kept=resolve_ops(["addmm", "bmm"])))
    rows, length, width = 8, 6, 16
    assert hits == {"addmm"}
    assert kept.saved_activation_bytes - nothing.saved_activation_bytes == 4 * len(blocks) * rows * length * 4 * width
    real = measure(module, lambda: module.training_step(batch, 0))
    assert nothing.saved_activation_bytes < real.saved / 4


# ---- names ---


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "half"}, "mode must be one of 'full', 'selective', 'none'"),
        ({"every": 0}, "every must be a positive integer"),
        ({"ops": ["mm"]}, "mode='full', ops="),
        ({"mode": "selective", "ops": "mm"}, "ops must be a list"),
    ],
)
def test_options_that_no_run_could_meet(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RecomputeOptions(**options)


class Flat(Net):
    def __init__(self) -> None:
        super().__init__(depth=1)


class Writes(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("calls", torch.zeros(()))
            block.out.register_forward_hook(lambda module, args, out, block=block: block.calls.add_(1) and None)


BAD: dict[str, tuple[type[Net], dict[str, Any], str]] = {
    "pattern": (Net, {"recompute": RecomputeOptions(blocks=["Layer"])}, "'Layer' matches nothing"),
    "no operator": (Net, {"recompute": RecomputeOptions(mode="selective", ops=["matmull"])}, "must name operators"),
    "unused operator": (Net, {"recompute": RecomputeOptions(mode="selective", ops=["bmm"])}, "'bmm' matches nothing"),
    "no stack": (Flat, {"recompute": FULL}, "recompute acts on the blocks"),
    "no stack to compile": (Flat, {"compile": True}, "compile acts on the blocks"),
    "unit inside": (Net, {"compile": True, "fsdp_units": ["Block", "*.qkv"]}, "the unit of blocks.0.qkv and 3 more"),
    "buffers": (Writes, {"recompute": FULL}, "writes to its buffer 'calls'"),
}


def _bad(name: str) -> None:
    make, arguments, _ = BAD[name]
    train({"zero_stage": 3, **arguments}, make)


@pytest.mark.parametrize("name", BAD)
def test_names_that_match_nothing_are_refused_on_all_ranks(run_distributed: WorkerPool, name: str) -> None:
    for error in run_distributed.errors(_bad, name):
        assert isinstance(error, ValueError), error
        assert BAD[name][2] in str(error)
        assert all(part in str(error) for part in ("Got:", "From:", "Change:"))


def test_a_deep_copy_recomputes_with_its_own_layers() -> None:
    import copy

    from lightning_pardist.base.recomputing import Recomputation, recompute_block

    block = Block(0.0)
    recompute_block(block, Recomputation())
    other = copy.deepcopy(block)
    nn.init.zeros_(other.scale)
    x, mask = torch.randn(2, 6, 16), torch.ones(6, 6, dtype=torch.bool)
    assert torch.equal(other(x, mask=mask), x)
    other(x, mask=mask).sum().backward()
    assert block.scale.grad is None and other.scale.grad is not None
