"""What every program is given: a checkpoint to start from, data, and the line that it stops at between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.support.gpt import quiet
from benchmarks.support.state import LiveState, live_state
from benchmarks.support.traffic import Collective, CollectiveRecorder

COUNTED_STEP, TRACED_STEP = 2, 3
"""Steps of the warm-up whose collectives are counted, and whose allocations are followed."""


@dataclass(frozen=True)
class Shape:
    """Of the Llama and of the global batch."""

    vocabulary: int = 1024
    length: int = 64
    width: int = 192
    blocks: int = 4
    heads: int = 8
    rows: int = 8

    def build(self) -> LlamaForCausalLM:
        """Returns the model with the weights that all start from."""
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.width,
                intermediate_size=3 * self.width,
                num_hidden_layers=self.blocks,
                num_attention_heads=self.heads,
                num_key_value_heads=self.heads // 2,
                max_position_embeddings=self.length,
                use_cache=False,
            )
        )


class RandomTokens(Dataset[Tensor]):
    """What the tokens say makes no difference to the time."""

    def __init__(self, shape: Shape, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randint(0, shape.vocabulary, (count, shape.length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index]


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the mean cross-entropy of logits (rows, length, words) and the tokens that came (rows, length)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class LitLlama(L.LightningModule):
    """The module of all Lightning programs; it knows nothing of devices."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = LlamaForCausalLM.from_pretrained(task.checkpoint)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return next_token_loss(self.model(tokens[:, :-1]).logits, tokens[:, 1:])

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)


@dataclass
class Found:
    """What one program left behind on this rank."""

    losses: list[float | None] = field(default_factory=list)
    """By step; None on a rank that has none, as all but the last stage of a pipeline."""
    collectives: list[Collective] = field(default_factory=list)
    state: LiveState | None = None
    growth: int = 0
    """Most bytes, taken from the allocator within one step, that were held at once."""


@dataclass
class Task:
    """Given to every program, together with what it must call between its steps."""

    checkpoint: str
    data: Dataset[Tensor]
    rows: int
    """Of each rank that has its own rows."""
    steps: int
    sampler: Sampler[int] | None
    """For Trainers: None where the strategy deals out the samples in the order of one process. Lightning's own
    strategies shuffle them in training whatever the loader says, so they are given the order."""
    found: Found
    pause: Callable[[], None]
    _step: int = -1
    _watch: Any = None

    def __post_init__(self) -> None:
        self._watches: dict[int, Callable[[], Any]] = {COUNTED_STEP: CollectiveRecorder, TRACED_STEP: AllocationTrace}

    def start(self) -> None:
        """Stops between two steps, and watches one of the first."""
        self._unwatch()
        self.pause()
        self._step += 1
        if self._step in self._watches:
            self._watch = self._watches[self._step]()
            self._watch.__enter__()

    def end(self, loss: Tensor | None, model: nn.Module, *optimizers: Optimizer) -> None:
        """Notes the loss of a step and, once, what is alive: before gradients are cleared."""
        self.found.losses.append(None if loss is None else _number(loss))
        if self.found.state is None and optimizers:
            # Accelerate hands back its own object around the optimizer.
            self.found.state = live_state(model, [getattr(one, "optimizer", one) for one in optimizers])

    def loader(self) -> DataLoader[Tensor]:
        """Returns what a Trainer fits: the same in every Lightning program."""
        return DataLoader(self.data, self.rows, sampler=self.sampler)

    @property
    def quiet(self) -> dict[str, Any]:
        """Arguments of a Trainer that shows nothing and stops where all others do."""
        return quiet(callbacks=[_AtStartLine(self)])

    def _unwatch(self) -> None:
        if self._watch is None:
            return
        self._watch.__exit__(None, None, None)
        if isinstance(self._watch, CollectiveRecorder):
            self.found.collectives = self._watch.collectives
        else:
            self.found.growth = self._watch.most
        self._watch = None


class AllocationTrace:
    """Follows what this thread's tensors take from the allocator, and when they give that back.

    What was taken before is not followed: gradients of the step before, say, that go in this one.
    """

    def __init__(self) -> None:
        self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        self.most = 0

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        self.most = most_held(self._changes())

    def _changes(self) -> Iterable[int]:
        events = [event for event in self._profile.kineto_results.events() if event.name() == "[memory]"]
        return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def most_held(changes: Iterable[int]) -> int:
    """Returns the highest sum of bytes taken (positive) and given back (negative) in turn."""
    most = held = 0
    for change in changes:
        held += change
        most = max(most, held)
    return most


class _AtStartLine(L.Callback):
    def __init__(self, task: Task) -> None:
        self._task = task

    def on_train_batch_start(self, *args: Any) -> None:
        self._task.start()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self._task.end(outputs["loss"], module, *trainer.optimizers)


def _number(loss: Tensor) -> float:
    loss = loss.detach()
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
