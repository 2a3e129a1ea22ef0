"""Accelerate: its data parallel, and its FSDP2."""

from __future__ import annotations

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from benchmarks.peer_programs.task import Task, next_token_loss


def _fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Makes accelerate keep its promise on CPU processes, where it drops the plugin in silence and trains as ddp."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def ddp(task: Task) -> None:
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(task.data, task.rows))
    for tokens in loader:
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        task.end(loss, model, optimizer)


def fsdp(task: Task) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    _fsdp_on_cpu(accelerator, plugin)  # not counted
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(task.data, task.rows))
    for tokens in loader:
        task.start()
        loss = next_token_loss(model(tokens[:, :-1]).logits, tokens[:, 1:])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        task.end(loss, model, optimizer)
