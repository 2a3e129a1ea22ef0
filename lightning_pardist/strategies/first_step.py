"""``verify="full"``: the first step of the whole module against the same step on the ranks' shares, by numbers.

Copies run with the weights that training will start from, in fp32 and without dropout (which differs by rank inside
regions). Outputs, logged values, buffers and the gradients of all parameters must agree. Nothing of the module, its
metrics, its trainer or the random state changes.
"""

from __future__ import annotations

import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

from lightning_pardist.apply.materialize import Weights
from lightning_pardist.base.errors import message
from lightning_pardist.base.free_memory import free_bytes
from lightning_pardist.base.nested import tensors_of
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.real_step import RealStep
from lightning_pardist.describe.sample import keep_rng_state
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.run.no_dropout import NoDropout
from lightning_pardist.run.tensor_gradients import PartialGradients
from lightning_pardist.run.tensor_mode import TensorMode, alone_on
from lightning_pardist.run.vocabulary import VocabularyShards
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.strategies.probe_compare import Run, difference, keep_share
from lightning_pardist.strategies.probe_runs import Verdict, cut_copy, first_line
from lightning_pardist.strategies.sample import Sample
from lightning_pardist.torch_dtensor_api import local_tensor

_SHARE_OF_FREE = 0.8
"""Of the memory that is free: estimates below it held in practice."""


@dataclass(frozen=True)
class FirstStep:
    """What to run, and where."""

    module: nn.Module
    profile: ModelProfile
    sample: Sample
    meshes: Meshes
    device: torch.device


def prove_first_step(plan: TensorPlan, step: FirstStep) -> TensorPlan:
    """Returns the plan with a note on what was proved; every rank must call it.

    Raises:
        ValueError: on all ranks, if the step computes something else on shares, or the whole one does not fit.
    """
    _check_stages(step)
    _check_random_numbers(plan)
    _check_memory(plan, step)
    with keep_rng_state(), torch.enable_grad(), torch.autocast(step.device.type, enabled=False), NoDropout():
        verdict = _compared(plan, _with_common_batch(step))
    everybody: list[Verdict] = gather_objects(verdict, step.meshes)
    wrong = [f"{found.problem} (rank {rank})" for rank, found in enumerate(everybody) if found.problem]
    if wrong:
        raise ValueError(
            message(
                "The first step must compute the same on shares as on the whole.",
                got=wrong[0],
                source=f"{type(step.module).__name__}.{step.sample.entry} on the first batch, in fp32 without dropout",
                change="keep the layers around what is named whole with TensorOptions(plan={'<layer>': 'replicate'}), "
                "or TensorOptions(verify='probe')",
            )
        )
    largest = max(found.difference for found in everybody)
    note = f"the first step was compared with the whole module's: differences up to {largest:.1e}"
    return replace(plan, notes=(*plan.notes, note))


def _compared(plan: TensorPlan, step: FirstStep) -> Verdict:
    whole = _ready(step)
    try:
        with _seeded():
            want = _noted(whole, whole.run())
    except Exception as error:
        return _agreed(f"the whole step fails: {type(error).__name__}: {first_line(error)}, at {blame(error)}", step)
    if problem := _agreed("", step).problem:
        return Verdict(problem=problem)
    want.parameters = {n: p.grad.detach() for n, p in whole.module.named_parameters() if p.grad is not None}
    del whole
    keep_share(want, plan, int(step.meshes.tensor.get_local_rank()))
    # A rank with other sizes may fail alone: nobody may wait for it in a collective.
    dry = _on_shares(plan, step, dry=True)
    failed = _agreed(dry if isinstance(dry, str) else "", step)
    if failed.problem:
        return failed
    got = _on_shares(plan, step, dry=False)
    if isinstance(got, str):
        return Verdict(problem=got)
    largest, problem = difference(got, want)
    return Verdict(difference=largest, problem=problem)


def _agreed(problem: str, step: FirstStep) -> Verdict:
    """Returns the first problem of any rank; every rank must call it."""
    return Verdict(problem=next((found for found in gather_objects(problem, step.meshes) if found), ""))


def _on_shares(plan: TensorPlan, step: FirstStep, *, dry: bool) -> Run | str:
    """Returns what a run gave, or what ended it; one that is dry exchanges nothing."""
    copy = _ready(step)
    apart = tuple(
        f"{name}.{key}"
        for name, child in copy.module.named_modules()
        if isinstance(child, Metric)
        for key, _ in child.named_parameters()
    )
    model = cut_copy(copy.module, plan, step.meshes, apart)
    model.profile = step.profile
    mode, partial_gradients = TensorMode(model, alone_on(model) if dry else None), PartialGradients(model)
    try:
        with _seeded(), _shards_shown(model), mode.step():
            run = _noted(copy, copy.run())
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}, at {blame(error)}"
    finally:
        mode.remove()
    if not dry:
        for held in model.shards:
            held.publish_gradient()
        partial_gradients.end_window()
        named = copy.module.named_parameters()
        run.parameters = {name: local_tensor(p.grad) for name, p in named if p.grad is not None}
    return run


def _ready(step: FirstStep) -> RealStep:
    """Returns a copy with the weights that training will start from, equal on all ranks."""
    copy = RealStep(step.module, step.sample.batch, step.sample.entry)
    Weights(copy.module, step.device, step.meshes).make_ready(copy.module)
    copy.in_single_precision(step.device)
    return copy


def _noted(step: RealStep, output: Any) -> Run:
    """Returns outputs, logged values and buffers; logits over a sharded vocabulary whole."""
    found = [t.whole() if isinstance(t, VocabularyShards) else t for t in tensors_of(output)]
    named = {f"the logged {name}": value for name, value in step.logged.items()}
    named |= {f"the buffer {n}": b.detach() for n, b in step.module.named_buffers() if b.is_floating_point()}
    floats = enumerate(out.detach() for out in found if out.is_floating_point())
    return Run(outputs=dict(floats), named=named)


@contextmanager
def _shards_shown(model: ParallelModel) -> Iterator[None]:
    for held in model.shards:
        held.show_local()
    try:
        yield
    finally:
        for held in model.shards:
            held.show_stored()


@contextmanager
def _seeded() -> Iterator[None]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    yield


def _with_common_batch(step: FirstStep) -> FirstStep:
    """Returns the step on rank 0's batch: ranks may have drawn other augmentations."""
    data = problem = None
    try:
        data = pickle.dumps(step.sample.batch) if torch.distributed.get_rank() == 0 else None
    except Exception as error:  # every rank must hear of it
        problem = first_line(error)
    data, problem = gather_objects((data, problem), step.meshes)[0]
    if data is None:
        raise ValueError(
            message(
                "TensorOptions(verify='full') runs the first batch of rank 0 on all ranks.",
                got=f"a batch that cannot be sent: {problem}",
                source="the training data",
                change="give HybridStrategy(sample_batch=...) with tensors, or TensorOptions(verify='probe')",
            )
        )
    return replace(step, sample=Sample(pickle.loads(data), step.sample.entry))


def _check_stages(step: FirstStep) -> None:
    stages = step.meshes.sizes.pipeline_parallel
    if stages > 1:
        raise ValueError(
            message(
                "TensorOptions(verify='full') runs the whole module on every rank, before it is cut into stages.",
                got=f"verify='full', pipeline_parallel_size={stages}",
                source="the strategy's arguments",
                change="use TensorOptions(verify='probe'), or try the tensor axis without a pipeline once",
            )
        )


def _check_random_numbers(plan: TensorPlan) -> None:
    drawn = [c for c in plan.calls if c.is_random and c.function in ("bernoulli", "rrelu", "rand_like", "randn_like")]
    if drawn:
        raise ValueError(
            message(
                "TensorOptions(verify='full') compares numbers, so none may be drawn inside a region: every rank draws "
                "others for its share.",
                got=f"{drawn[0].function} in {drawn[0].module}",
                source="the flow of data through the module's own step",
                change="use TensorOptions(verify='probe')",
            )
        )


def _check_memory(plan: TensorPlan, step: FirstStep) -> None:
    """Refuses, on all ranks, a step whose whole weights and activations do not fit beside the module."""
    weights = sum(4 * p.numel for p in step.profile.parameters)
    gradients = sum(4 * p.numel for p in step.profile.parameters if p.requires_grad)
    activations = step.profile.saved_activation_bytes
    need = weights + gradients + max(activations, weights // plan.size)
    everybody = gather_objects((_place(step.device), free_bytes(step.device)), step.meshes)
    places = [place for place, _ in everybody]
    for place, free in everybody:
        ranks = places.count(place)
        if need * ranks > _SHARE_OF_FREE * free:
            raise ValueError(
                message(
                    "TensorOptions(verify='full') runs the first step with whole weights on every rank, which must fit "
                    f"into {_SHARE_OF_FREE:.0%} of the memory that is free.",
                    got=f"{need:,} bytes a rank (weights {weights:,}, gradients {gradients:,}, activations "
                    f"{activations:,}), {ranks} rank(s) on {place} with {free:,} bytes free",
                    source="the described step, and the device",
                    change="use TensorOptions(verify='probe'), or a smaller batch",
                )
            )


def _place(device: torch.device) -> str:
    return socket.gethostname() if device.type == "cpu" else f"{socket.gethostname()} {device}"
