"""The parallelism that transformers carries out itself while it loads a checkpoint, by the plans its models ship."""

from __future__ import annotations

from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.peer_programs.task import Task, next_token_loss


def fsdp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint, distributed_config=DistributedConfig(fsdp_size=2))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows, sampler=DistributedSampler(task.data, shuffle=False)):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def tp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint, distributed_config=DistributedConfig(tp_size=2))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def pp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint, distributed_config=DistributedConfig(pp_size=2))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(task.data, task.rows):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)


def fsdp_tp(task: Task) -> None:
    config = DistributedConfig(fsdp_size=2, tp_size=2)
    model = LlamaForCausalLM.from_pretrained(task.checkpoint, distributed_config=config)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(task.data, 2, model._mesh_manager.get_mesh("fsdp").get_local_rank(), shuffle=False)
    for tokens in DataLoader(task.data, task.rows, sampler=sampler):
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.end(loss, model, optimizer)
