"""DeepSpeed's ZeRO-3 engine. On CPU processes it wants DS_ACCELERATOR=cpu in the environment."""

from __future__ import annotations

import deepspeed
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM

from benchmarks.peer_programs.task import Task, next_token_loss


def fsdp(task: Task) -> None:
    model = LlamaForCausalLM.from_pretrained(task.checkpoint)
    config = {
        "train_micro_batch_size_per_gpu": task.rows,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for tokens in DataLoader(task.data, task.rows, sampler=DistributedSampler(task.data, shuffle=False)):
        task.start()
        loss = next_token_loss(engine(tokens[:, :-1]).logits, tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        task.end(loss, model, optimizer)
