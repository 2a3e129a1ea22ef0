"""Lightning programs: one process, Lightning's own strategies, and ours."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.peer_programs.task import LitLlama, Task
from lightning_pardist import HybridStrategy


def one_process(task: Task) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def lightning_ddp(task: Task) -> None:
    trainer = L.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


class ShardedLlama(LitLlama):
    def configure_model(self) -> None:
        for block in self.model.model.layers:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def lightning_fsdp(task: Task) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(ShardedLlama(task), task.loader())


class SharedLlama(LitLlama):
    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        words, logits = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.model, mesh, {"model.embed_tokens": words, "lm_head": logits})
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = {
            "self_attn.q_proj": column,
            "self_attn.k_proj": column,
            "self_attn.v_proj": column,
            "self_attn.o_proj": row,
            "mlp.gate_proj": column,
            "mlp.up_proj": column,
            "mlp.down_proj": row,
        }
        for block in self.model.model.layers:
            parallelize_module(block, mesh, plan)


def lightning_tp(task: Task) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(SharedLlama(task), task.loader())


class SharedAndShardedLlama(SharedLlama):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.model.layers:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def lightning_fsdp_tp(task: Task) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_steps=task.steps, **task.quiet)
    trainer.fit(SharedAndShardedLlama(task), task.loader())


def ours_ddp(task: Task) -> None:
    trainer = L.Trainer(strategy="pardist_ddp", accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def ours_fsdp(task: Task) -> None:
    trainer = L.Trainer(strategy="pardist_fsdp", accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def ours_tp(task: Task) -> None:
    trainer = L.Trainer(strategy="pardist_tp", accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def ours_pp(task: Task) -> None:
    trainer = L.Trainer(strategy="pardist_pp", accelerator="cpu", devices=2, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def ours_fsdp_tp(task: Task) -> None:
    strategy = HybridStrategy(data_parallel_shard_size=2, tensor_parallel_size=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())


def ours_fsdp_pp(task: Task) -> None:
    strategy = HybridStrategy(data_parallel_shard_size=2, pipeline_parallel_size=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_steps=task.steps, **task.quiet)
    trainer.fit(LitLlama(task), task.loader())
