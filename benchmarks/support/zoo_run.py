"""One case of the zoo on one layout: two steps by Lightning's Trainer, compared with those of one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.support.zoo_models import ROWS, STEPS, Case, build
from lightning_pardist import HybridStrategy, PipelineOptions, whole_tensor

TOLERANCE = 1e-5
CLIP = 0.1
NUDGE = 5e-7
"""A few units in the last place of an fp32 number, as sums of a hundred terms in another order differ."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}


@dataclass
class Notes:
    """What one run did."""

    losses: list[float] = field(default_factory=list)
    """Of every batch."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Whole, before clipping, of every optimizer step."""
    factors: list[float] = field(default_factory=list)
    """What clipping multiplied the gradients by, of every optimizer step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers at the end."""


class Recorder(L.Callback):
    """Fills the notes while the Trainer runs."""

    def __init__(self) -> None:
        self.notes = Notes()
        self._probe: tuple[torch.nn.Parameter, Tensor] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._note_factor())

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        found: dict[str, Tensor] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                found[name] = whole_tensor(parameter.grad).detach().clone()
        self.notes.gradients.append(found)
        largest = max(found, key=lambda name: _largest(found[name]), default=None)
        self._probe = None if largest is None else (pl_module.get_parameter(largest), found[largest])

    def _note_factor(self) -> None:
        assert self._probe is not None and self._probe[0].grad is not None
        before = self._probe[1].double()
        after = whole_tensor(self._probe[0].grad).detach().double()
        self.notes.factors.append(float((after * before).sum() / (before * before).sum()))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.notes.losses.append(float(metrics["loss"] if "loss" in metrics else next(iter(metrics.values()))))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = {name: whole_tensor(value.detach()).clone() for name, value in pl_module.named_parameters()}
        self.notes.weights = state


@dataclass
class Asked:
    """One run."""

    name: str
    layout: str | None
    """None for one process."""
    attempt: int | None = None
    double: bool = False
    """In 64-bit numbers."""
    parts: int = 1
    """One process takes its global batch in so many parts, as data ranks or micro-batches would."""
    whole_batch: bool = False
    """A pipeline gets its batch whole, in one micro-batch."""


@dataclass
class Reference:
    """What the main process has to know of the run in one process."""

    attempt: int
    losses: list[float]
    norms: list[float]
    names: list[str]
    parameters: int
    is_random: bool
    has_batch_norm: bool


@dataclass
class Result:
    """What one rank found when it compared itself with one process."""

    differences: list[str]
    error: float
    """The largest one, relative as in ``compare``."""
    compared: list[str]
    """Names of parameters that this rank holds."""
    details: str = ""


def reference(asked: Asked, file: Path) -> Reference:
    """Trains in one process and leaves its notes in a file."""
    _be_quiet()
    case = build(asked.name, asked.attempt)
    is_random = asked.attempt is None and _is_random(case, asked)
    if is_random or asked.attempt is None:
        case = build(asked.name, case.attempt)
    notes = _fit(case, asked, "auto")
    torch.save(notes, file)
    named = dict(case.module.named_parameters())
    norms = [float(torch.stack([g.norm() for g in step.values()]).norm()) for step in notes.gradients]
    batch_norms = [m for m in case.module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    return Reference(
        case.attempt,
        notes.losses,
        norms,
        list(named),
        sum(p.numel() for p in named.values()),
        is_random,
        bool(batch_norms),
    )


def own_rounding(asked: Asked, file: Path) -> float:
    """Returns by how much one process differs from the notes if its first weights are moved by five in ten million."""
    _be_quiet()
    case = build(asked.name, asked.attempt)
    generator = torch.Generator().manual_seed(7)
    for parameter in case.module.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    want: Notes = torch.load(file, weights_only=False, mmap=True)
    return compare(_fit(case, asked, "auto"), want, partial=False).error


def compared(asked: Asked, file: Path) -> Result:
    """Trains on this rank of a layout and compares with the notes of one process."""
    assert asked.layout is not None
    _be_quiet()
    case = build(asked.name, asked.attempt)
    if dist.get_rank():
        for parameter in case.module.parameters():  # rank 0's weights must win
            parameter.data.add_(0.01)
    options: dict[str, Any] = dict(LAYOUTS[asked.layout])
    if asked.layout == "pp" and asked.whole_batch:
        options["pipeline"] = PipelineOptions(schedule="gpipe", num_microbatches=1)
    strategy = HybridStrategy(print_plan=False, **options)
    notes = _fit(case, asked, strategy)
    want: Notes = torch.load(file, weights_only=False, mmap=True)
    return _with_details(compare(notes, want, asked.layout == "pp"), strategy)


def _fit(case: Case, asked: Asked, strategy: Any) -> Notes:
    world = dist.get_world_size() if dist.is_initialized() else 1
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=world,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=asked.parts,
        sync_batchnorm=True,
        precision="64-true" if asked.double else "32-true",
        callbacks=[recorder],
    )
    trainer.fit(case.module, _loader(case, asked, world))
    return recorder.notes


def _loader(case: Case, asked: Asked, world: int) -> DataLoader[Any]:
    if asked.parts > 1:
        batches = [
            list(range(step * ROWS + part, (step + 1) * ROWS, asked.parts))
            for step in range(STEPS)
            for part in range(asked.parts)
        ]
        return DataLoader(case.rows, batch_sampler=batches, collate_fn=case.collate)  # type: ignore[arg-type]
    rows = ROWS // world if asked.layout == "fsdp" else ROWS
    return DataLoader(case.rows, batch_size=rows, collate_fn=case.collate)


def compare(got: Notes, want: Notes, partial: bool) -> Result:
    """Returns in what two runs differ.

    Errors are relative: of losses and clip factors to themselves; of a gradient to its own largest element, or to a
    tenth of the largest gradient of the model if that is more (what remains where large parts cancel keeps the error of
    its parts; the bias before a batch norm has nothing else); of weights to their own largest element, at least 0.1.

    Args:
        got: the run in question.
        want: the one in one process.
        partial: ``got`` holds a part of the parameters, and NaN in place of the rest.
    """
    held = {n for n, w in got.weights.items() if not (partial and w.is_floating_point() and bool(w.isnan().any()))}
    errors: list[tuple[float, str]] = []
    for step, (ours, theirs) in enumerate(zip(got.losses, _joined(want.losses, len(got.losses)))):
        errors.append((_relative(ours - theirs, theirs), f"loss of step {step} is {ours:.8g}, not {theirs:.8g}"))
    for step, (factor, expected) in enumerate(zip(got.factors, want.factors, strict=True)):
        errors.append(
            (_relative(factor - expected, expected), f"clipped by {factor:.8g} at {step}, not {expected:.8g}")
        )
    for step, (mine, reference) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        floor = max(_largest(g) for g in reference.values()) / 10
        errors += _tensors(f"gradient at {step}", mine, reference, held, floor)
    errors += _tensors("weight", got.weights, want.weights, held, 0.1)
    wrong = [(error, text) for error, text in errors if not error <= TOLERANCE]
    return Result([text for _, text in sorted(wrong, reverse=True)], max(e for e, _ in errors), sorted(held))


def _joined(losses: list[float], count: int) -> list[float]:
    """Returns the means of as many parts of a batch as one process took it in."""
    parts = len(losses) // count
    return [sum(losses[i * parts : (i + 1) * parts]) / parts for i in range(count)]


def _tensors(
    what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], held: set[str], floor: float
) -> Iterator[tuple[float, str]]:
    for name in held:
        if (name in ours) != (name in theirs):
            yield float("inf"), f"{what} of {name} on one side only ({'ours' if name in ours else 'one process'})"
        elif name in ours and theirs[name].numel():
            error = float((ours[name].double() - theirs[name].double()).abs().max())
            scale = max(_largest(theirs[name]), floor)
            yield (error / scale if scale else error), f"{what} of {name} is off by {error:.1e} of {scale:.1e}"


def _relative(difference: float, value: float) -> float:
    return abs(difference) / abs(value) if value else abs(difference)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _is_random(case: Case, asked: Asked) -> bool:
    """Tells whether two passes over one batch differ: dropout that could not be turned off."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        fresh = build(asked.name, case.attempt)  # a pass may write buffers
        torch.manual_seed(seed)
        batch = next(iter(_loader(fresh, asked, 1)))
        fresh.module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        fresh.module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
        output = fresh.module.training_step(batch, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        assert isinstance(loss, Tensor)
        found.append(float(loss))
    return found[0] != found[1]


def _with_details(result: Result, strategy: HybridStrategy) -> Result:
    """Adds what was done, in a few words."""
    plan = strategy.plan
    assert plan is not None and strategy.parallel_model is not None
    profile = strategy.parallel_model.profile
    words: list[str] = []
    if plan.tensor is not None and profile is not None:
        sizes = {p.name: p.numel for p in profile.parameters}
        sharded = {layout.parameter for layout in plan.tensor.layouts}
        share = sum(sizes[n] for n in sharded) / sum(sizes.values())
        regions = sum(1 for share_ in plan.tensor.shares if share_ is not None)
        words.append(f"{share:.0%} sharded, {regions} regions")
    elif plan.pipeline is not None:
        counts = "+".join(str(len(stage.blocks)) for stage in plan.pipeline.stages)
        words.append(f"{counts} blocks, {plan.pipeline.num_microbatches} micro-batches")
    else:
        words.append(f"{len(plan.data_parallel.units)} units")
    if profile is not None and profile.source != "fake_run":
        words.append("by its module tree")
    result.details = ", ".join(words)
    return result


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
