"""The exact figures of a tensor axis: collectives of real steps and bytes of live state, by hand and by the plan.

With A = rows * positions * width * 4 bytes, R = rows * positions * 4 bytes:

| | all-reduces (bytes) | all-gathers (bytes) | reduce-scatters (bytes) |
| --- | --- | --- | --- |
| a block of an attention and an MLP | 4 (4 A) | | |
| a block, sequence parallel | | 4 (4 A) | 4 (4 A) |
| embedding, head | 1 + 1 (2 A) | | |
| loss over the vocabulary | 1 maximum (R), 1 of two sums (2 R) | | |
| ends of the stack, sequence parallel | | 1 + 1 (2 A) | |
| gradients of whole parameters used on shares | 1 in all, per optimizer step | | |
| clipping by norm | 1 (4 bytes) | | |
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.state import LiveState, live_state
from benchmarks.support.traffic import (
    Collective,
    CollectiveRecorder,
    Total,
    Traffic,
    axis_ranks,
    control_messages,
    planned,
    totals,
)
from lightning_pardist import HybridStrategy, TensorOptions
from tests.tensor_parallel.models import Trained
from tests.tensor_plan import models as parts

BLOCKS, ROWS, LENGTH, WORDS, WIDTH = 3, 2, 6, 96, parts.WIDTH
SEQUENCE = TensorOptions(sequence_parallel=True)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor_parallel_size": 2}),
    "tensor over 4": (4, {"tensor_parallel_size": 4}),
    "sequence": (2, {"tensor_parallel_size": 2, "tensor": SEQUENCE}),
    "sharded": (4, {"tensor_parallel_size": 2}),
    "sharded sequence": (4, {"tensor_parallel_size": 2, "tensor": SEQUENCE}),
}
"""World size and options."""
ACTIVATION, NUMBERS = ROWS * LENGTH * WIDTH * 4, ROWS * LENGTH * 4


class Even(Trained):
    """Everything divides, so that no figure holds padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(parts.Block(parts.FusedAttention("split")) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = self.words(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        loss = F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@dataclass
class Seen:
    """What one rank saw."""

    windows: list[list[Collective]]
    planned: Traffic
    state: LiveState
    tensor: tuple[int, ...]
    shard: tuple[int, ...]
    model: tuple[int, ...]
    """Ranks that hold one copy together."""


class Watch(L.Callback):
    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._recorder = CollectiveRecorder()
        self.windows: list[list[Collective]] = []
        self.state: LiveState | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index % self._accumulate == 0:
            self._recorder = CollectiveRecorder()
            self._recorder.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if (index + 1) % self._accumulate:
            return
        self._recorder.__exit__(None, None, None)
        self.state = live_state(module, trainer.optimizers)
        self.windows.append(self._recorder.collectives)


def watch(layout: str, accumulate: int) -> Seen:
    size, options = LAYOUTS[layout]
    assert size == dist.get_world_size()
    data_ranks = size // options["tensor_parallel_size"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (2 * accumulate * data_ranks * ROWS, LENGTH + 1), generator=generator)
    strategy, callback = HybridStrategy(print_plan=False, **options), Watch(accumulate)
    trainer = L.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.1,
        max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    torch.manual_seed(0)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    trainer.fit(Even(), DataLoader(data, batch_size=ROWS))
    meshes = strategy.meshes
    assert strategy.plan is not None and meshes is not None and callback.state is not None
    return Seen(
        windows=callback.windows,
        planned=planned(strategy.plan, meshes),
        state=callback.state,
        tensor=axis_ranks(meshes, "tensor_parallel"),
        shard=axis_ranks(meshes, "data_parallel_shard"),
        model=tuple(dist.get_process_group_ranks(meshes.model.get_group())),
    )


@pytest.fixture(scope="module")
def watched(run_distributed: Any) -> Any:
    """Each kind of run once: ``watched(layout, micro-batches per step)`` returns what its ranks saw."""

    @functools.cache
    def run(layout: str, accumulate: int) -> list[Seen]:
        return run_distributed(watch, layout, accumulate, world_size=LAYOUTS[layout][0])

    return run


def elements(module: nn.Module, size: int) -> tuple[int, int]:
    """Returns the elements of a rank of the tensor axis in what is sharded, and those of whole parameters."""
    shared, whole = 0, 0
    for name, p in module.named_parameters():
        is_shared = p.dim() > 1 or "qkv" in name or ".up." in name  # matrices, and biases of what opens a region
        if is_shared:
            assert p.numel() % size == 0
            shared += p.numel() // size
        else:
            whole += p.numel()
    return shared, whole


def by_hand(seen: Seen, layout: str, micro_batches: int) -> Traffic:
    """The table at the top of this file, with that of fully_shard."""
    module, k = Even(), micro_batches
    reduced, reduced_bytes = k * 4, k * (2 * ACTIVATION + 3 * NUMBERS)
    found: dict[tuple[str, tuple[int, ...]], Total] = {}
    if "sequence" in layout:
        found["all_gather", seen.tensor] = Total(k * (4 * BLOCKS + 2), k * (4 * BLOCKS + 2) * ACTIVATION)
        found["reduce_scatter", seen.tensor] = Total(k * 4 * BLOCKS, k * 4 * BLOCKS * ACTIVATION)
        reduced += 1
        # On the shards that fully_shard has left of them: it has reduced first.
        reduced_bytes += 4 * elements(module.blocks, 2)[1] // len(seen.shard)
    else:
        reduced += k * 4 * BLOCKS
        reduced_bytes += k * 4 * BLOCKS * ACTIVATION
    found["all_reduce", seen.tensor] = Total(reduced, reduced_bytes)
    if "sharded" in layout:
        blocks = sum(elements(module.blocks, 2))
        root = sum(elements(module, 2)) - blocks
        found["all_gather", seen.shard] = Total(k * (2 * BLOCKS + 1), k * (2 * blocks + root) * 4)
        found["reduce_scatter", seen.shard] = Total(k * (BLOCKS + 1), k * (blocks + root) * 4)
    return found


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_one_step_moves_what_the_plan_says(watched: Any, layout: str) -> None:
    for seen in watched(layout, 1):
        for window in seen.windows:
            assert totals(window, "data") == seen.planned == by_hand(seen, layout, 1)


@pytest.mark.parametrize("layout", ["sequence", "sharded sequence"])
def test_gradients_of_norms_are_summed_once_per_step(watched: Any, layout: str) -> None:
    for seen in watched(layout, 2):
        for window in seen.windows:
            assert totals(window, "data") == by_hand(seen, layout, 2)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_clipping_costs_one_number(watched: Any, layout: str) -> None:
    for seen in watched(layout, 1):
        for window in seen.windows:
            assert totals(window, "clip") == {("all_reduce", seen.model): Total(1, 4)}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_rank_holds_its_share(watched: Any, layout: str) -> None:
    """1/t of what is sharded and all of the rest, over d; Adam's moments twice that."""
    size, options = LAYOUTS[layout]
    t = options["tensor_parallel_size"]
    share = 4 * sum(elements(Even(), t)) * t // size
    for seen in watched(layout, 1):
        state = seen.state
        assert (state.parameters, state.gradients, state.optimizer) == (share, share, 2 * share)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_step_costs_two_small_messages_besides(watched: Any, layout: str) -> None:
    """As on the data axes: one agreement, one sum of what was logged. The first step compares batches too."""
    for seen in watched(layout, 1):
        for window in seen.windows[1:]:
            assert control_messages(window) == {
                "all_reduce by lightning_pardist.run.agree": (1, 40),
                "all_reduce by lightning_pardist.strategies.metrics": (1, 16),
            }
