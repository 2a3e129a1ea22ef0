"""What a Trainer leaves behind when it is gone: nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
from torch import nn

from tests.strategies.common import LAYOUTS, Tower, loader, make_trainer


class Idle(Tower):
    """With a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


def many_trainers(layout: dict[str, Any], folder: str) -> tuple[list[int], list[bool]]:
    """Returns how many threads there were after each Trainer, and whether its module and strategy are still alive."""
    threads, alive = [], []
    for number in range(3):
        module = Idle()
        trainer = make_trainer(layout, 2, max_steps=1)
        trainer.fit(module, loader(16, 4))
        trainer.save_checkpoint(f"{folder}/{number}")
        trainer.validate(module, loader(16, 4), verbose=False)  # finds the module as fit has left it
        gone = [weakref.ref(module), weakref.ref(trainer.strategy)]
        del module, trainer
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc") else threading.active_count())
        alive += [ref() is not None for ref in gone]
    return threads, alive


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_nothing_is_kept_of_a_trainer_that_is_gone(run_distributed: Any, tmp_path: Any, name: str) -> None:
    for threads, alive in run_distributed(many_trainers, LAYOUTS[name], str(tmp_path), world_size=2):
        assert not any(alive)
        assert threads[2] <= threads[1], threads
