"""Loops in plain torch: one process, and the same layouts by hand with torch's own pieces."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM

from benchmarks.peer_programs.task import Task, next_token_loss


def one_process(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def ddp(task: Task) -> None:
    model = DistributedDataParallel(LlamaForCausalLM.from_pretrained(task.checkpoint), gradient_as_bucket_view=True)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows, sampler=DistributedSampler(task.data, shuffle=False)):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def fsdp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows, sampler=DistributedSampler(task.data, shuffle=False)):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def share_matrices(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    words = RowwiseParallel(input_layouts=Replicate())
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"model.embed_tokens": words, "lm_head": logits})
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
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)


def tp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    share_matrices(model, init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows):
        task.start()
        with loss_parallel():
            loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def fsdp_tp(task: Task) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    share_matrices(model, mesh["tensor"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(task.data, 2, mesh["data"].get_local_rank(), shuffle=False)
    for tokens in DataLoader(task.data, task.rows, sampler=sampler):
        task.start()
        with loss_parallel():
            loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


class Stage(nn.Module):
    def __init__(self, model: LlamaForCausalLM, index: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == stages - 1
        count = len(model.model.layers) // stages
        self.embed = model.model.embed_tokens if self.is_first else None
        self.rotary = model.model.rotary_emb
        self.blocks = model.model.layers[index * count : (index + 1) * count]
        self.norm = model.model.norm if self.is_last else None
        self.head = model.lm_head if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x, attention_mask=None, position_embeddings=angles)
        return self.head(self.norm(x)) if self.is_last else x


def pp(task: Task) -> None:
    rank = dist.get_rank()
    model = Stage(LlamaForCausalLM.from_pretrained(task.checkpoint), rank, 2)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=next_token_loss)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows):
        task.start()
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if model.is_first:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        task.end(torch.stack(losses).mean() if losses else None, model, optimizer)


def fsdp_pp(task: Task) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    rank = mesh["pipeline"].get_local_rank()
    model = Stage(LlamaForCausalLM.from_pretrained(task.checkpoint), rank, 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=next_token_loss)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(task.data, 2, mesh["data"].get_local_rank(), shuffle=False)
    for tokens in DataLoader(task.data, task.rows, sampler=sampler):
        task.start()
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if model.is_first:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        task.end(torch.stack(losses).mean() if losses else None, model, optimizer)
