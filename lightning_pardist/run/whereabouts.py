"""Where in its plan a rank is, so that one that waits for others can say so before its collective fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pardist.parallel_model import ParallelModel

_ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


class Whereabouts:
    """The position of one rank: step, micro-batch, phase, block. Keeping it costs one attribute per block and call."""

    def __init__(self, model: ParallelModel, rank: int) -> None:
        self._rank = rank
        self._step = self._micro_batch = 0
        self._phase = ""
        self._block = ""
        self._action = ""
        self._since = time.monotonic()
        self._handles: list[RemovableHandle] = []
        stage = model.plan.sizes.pipeline_parallel
        self._stage = "" if stage == 1 else f"pipeline rank {_coordinate(model)} of {stage}, "
        blocks = [block.name for block in model.profile.blocks()] if model.profile is not None else []
        for name in blocks:
            with suppress(AttributeError):  # a block of another stage
                block = model.module.get_submodule(name)
                self._handles.append(block.register_forward_pre_hook(self._entering(name)))

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._block = name
            self._since = time.monotonic()

        return hook

    @contextmanager
    def inside(self, phase: str, *, step: int | None = None, micro_batch: int | None = None) -> Iterator[None]:
        """Notes that the rank is in a phase of a step; a phase that fails stays noted, for ``text``."""
        self._step = self._step if step is None else step
        self._micro_batch = self._micro_batch if micro_batch is None else micro_batch
        outer = self._phase, self._block, self._action
        self._phase, self._block, self._action, self._since = phase, "", "", time.monotonic()
        yield
        self._phase, self._block, self._action = outer
        self._since = time.monotonic()

    def at_action(self, kind: str, stage: int, micro_batch: int) -> None:
        """Notes the last action of a pipeline's schedule that the rank has begun."""
        self._action = f", in or after the {_ACTIONS[kind]} of micro-batch {micro_batch} on stage {stage}"
        self._since = time.monotonic()

    def text(self) -> str:
        """Returns the position in words."""
        block = f", in or after {self._block}" if self._block else ""
        phase = self._phase or "between steps"
        where = f"{self._stage}step {self._step}, batch {self._micro_batch}, {phase}{self._action}{block}"
        return f"rank {self._rank} is at {where}"

    @property
    def stuck_for_s(self) -> float:
        """Seconds without progress inside a phase; 0 between phases."""
        return time.monotonic() - self._since if self._phase else 0.0

    def close(self) -> None:
        """Takes the hooks off the blocks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class StuckWatch:
    """A thread that prints a rank's whereabouts when it makes no progress, once per place."""

    def __init__(self, where: Whereabouts, after_s: float) -> None:
        self._where = where
        self._after_s = after_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pardist-stuck-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        told = ""
        while not self._ended.wait(min(1.0, self._after_s / 4)):
            text = self._where.text()
            if self._where.stuck_for_s > self._after_s and text != told:
                told = text
                print(f"pardist: no progress for {self._where.stuck_for_s:.0f} s: {text}", file=sys.stderr, flush=True)


def _coordinate(model: ParallelModel) -> int:
    return 0 if model.meshes is None else int(model.meshes.world["pipeline_parallel"].get_local_rank())
