"""Modules built on the meta device under every axis: the weights of one rank, and what they learn from there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.parity.runs import GLOBAL_BATCH, Record, Recorder, differences
from tests.strategies.common import make_trainer
from tests.support.modules import GPT, LENGTH, VOCABULARY, Block, Llama
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(300)
WIDTH = 64


class MetaGPT(GPT):
    """Tied, with an ``_init_weights`` of its own for embeddings, and ``reset_parameters`` for the rest."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(4)])
            self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)


class MetaLlama(Llama):
    """A model of transformers, whose rotary tables are buffers that no checkpoint has."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Llama().model

    def loss(self, batch: Any) -> Tensor:
        assert self.model is not None
        return self.model(input_ids=batch[0], labels=batch[0]).loss


MODULES = {"gpt": MetaGPT, "llama": MetaLlama}
TP, PP, SHARD = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_shard_size": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {2: [SHARD, TP, PP], 4: [{**TP, **SHARD}, {**PP, **SHARD}, {**PP, **TP}]}


def train(name: str, arguments: dict[str, Any]) -> Record:
    torch.manual_seed(5)  # the one thing that all layouts have in common
    module, recorder = MODULES[name](), Recorder()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trainer = make_trainer(arguments, ranks, max_epochs=None, max_steps=3, callbacks=[recorder], gradient_clip_val=0.1)
    rows = GLOBAL_BATCH // arguments.get("data_parallel_shard_size", 1)
    trainer.fit(module, DataLoader(module.dataset(24, seed=5), batch_size=rows))
    return recorder.record


def train_on(layouts: list[dict[str, Any]]) -> list[Record]:
    return [train(name, layout) for name in MODULES for layout in layouts]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_meta_modules_train_as_on_one_rank(run_distributed: WorkerPool, run_single: Any, world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    wanted = [run_single(train, name, {}) for name in MODULES]
    assert all(want.moved > 1e-4 for want in wanted)
    cases = [(name, want, layout) for name, want in zip(MODULES, wanted, strict=True) for layout in layouts]
    found = []
    for rank, records in enumerate(run_distributed(train_on, layouts, world_size=world_size, timeout=280)):
        for (name, want, layout), record in zip(cases, records, strict=True):
            texts = differences(record, want, partial="pipeline_parallel_size" in layout)
            found += [f"{name}, {layout}, rank {rank}: {text}" for text in texts]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])
