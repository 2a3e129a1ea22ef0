"""What one rank's step does, found by running it on fake tensors: its stage, on its share of every matrix.

The very code that runs a step in training (``TensorMode``, ``StageProgram``) runs here on a fake copy, with ``Alone``
in the place of the group: nothing is sent, every collective is noted, and what autograd keeps is seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pardist.apply import install_stand_ins, local_part
from lightning_pardist.base.nested import tensors_in
from lightning_pardist.base.recomputing import Recomputation, recompute_block, resolve_ops
from lightning_pardist.base.torch_api import storage_key
from lightning_pardist.describe.entries import Entry
from lightning_pardist.describe.levers import cast_inputs_to
from lightning_pardist.describe.profile import profile_prepared
from lightning_pardist.describe.record import StepRecorder
from lightning_pardist.parallel_model import HeldShard, ParallelModel, PipelineCut
from lightning_pardist.plan.stage_work import StageRun
from lightning_pardist.run.stage_program import MicroBatch, StageProgram, StepRun
from lightning_pardist.run.tensor_mode import TensorMode
from lightning_pardist.run.tensor_ops import Alone
from lightning_pardist.specs.block_levers import RecomputePlan
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.parallel_plan import DataParallelPlan, ParallelPlan
from lightning_pardist.specs.pipeline_plan import Leaf, Outputs, StagePlan


@dataclass(frozen=True, kw_only=True)
class StepToRun:
    """The step of one rank."""

    module: nn.Module
    """The user's; it stays as it is."""
    batch: Any
    """The largest micro-batch."""
    entry: Entry
    plan: ParallelPlan
    profile: ModelProfile
    recompute: RecomputePlan
    gather_dtype: torch.dtype | None
    autocast_dtype: torch.dtype | None
    device: torch.device
    stage: StagePlan | None = None
    """None without a pipeline."""
    outputs: Mapping[int, Outputs] = field(default_factory=dict)
    """What blocks give back for this micro-batch."""


def run_step(given: StepToRun) -> StageRun:
    """Returns what one forward and backward pass takes on the first rank of the tensor axis.

    Raises:
        Exception: whatever ended the run.
    """
    return _Run(given).result()


class _Kept:
    """What autograd keeps; gone when it lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Run:
    """One run."""

    def __init__(self, given: StepToRun) -> None:
        self._given = given
        self._recorder: StepRecorder | None = None
        self._exchanges: list[tuple[str, int]] = []
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._results: list[Tensor] = []
        """Kept for their own sake: results of recomputed blocks, what is sent to the next stage."""
        self._elsewhere: list[Tensor] = []
        """Received tensors, which lie in buffers of their own."""
        self._activation_bytes = 0
        self._grew = False
        names = frozenset(p.name for p in given.profile.parameters)
        pipeline, stage = given.plan.pipeline, given.stage
        self._held = names if pipeline is None or stage is None else pipeline.held_by(stage.rank)
        """First names of the parameters that are here: what another stage has is whole there, and NaN."""

    def result(self) -> StageRun:
        given = self._given
        profile_prepared(
            given.module,
            given.batch,
            self._prepare,
            reshape=self._cut,
            gather_dtype=given.gather_dtype,
            entry=given.entry,
            autocast_dtype=given.autocast_dtype,
            device=given.device,
        )
        assert self._recorder is not None
        segments = self._recorder.segments
        return StageRun(
            flops_forward=sum(segment.flops_forward for segment in segments),
            flops_backward=sum(segment.flops_backward for segment in segments),
            activation_bytes=self._activation_bytes,
            exchanges=tuple(self._exchanges),
        )

    # ---- the module of one rank

    def _cut(self, fake: nn.Module) -> None:
        """Gives the fake module this rank's shares of parameters."""
        tensor = self._given.plan.tensor
        if tensor is None:
            return
        layouts = {layout.parameter: layout for layout in tensor.layouts if layout.parameter in self._held}
        own = {id(p): layouts[name] for name, p in fake.named_parameters() if name in layouts}
        made: dict[int, nn.Parameter] = {}
        for module in fake.modules():
            for key, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(whole) in own:
                    if id(whole) not in made:
                        share = local_part(whole.detach(), own[id(whole)], 0)
                        made[id(whole)] = nn.Parameter(share, requires_grad=whole.requires_grad)
                        made[id(whole)].__dict__.update(vars(whole))
                    module.register_parameter(key, made[id(whole)])

    def _prepare(self, fake: nn.Module, recorder: StepRecorder) -> None:
        """Does what ``apply_plan`` does, in its order."""
        given = self._given
        self._recorder, self._activation_bytes = recorder, 0
        for found in (self._exchanges, self._results, self._elsewhere):
            found.clear()  # of a run that has to be repeated
        nothing_sharded = replace(given.plan, data_parallel=DataParallelPlan(kind="none", zero_stage=0))
        model = ParallelModel(module=fake, plan=nothing_sharded, meshes=None, profile=given.profile)
        self._recompute(model)
        if given.gather_dtype is not None:
            for block in given.profile.blocks():
                hook = cast_inputs_to(given.gather_dtype)
                fake.get_submodule(block.name).register_forward_pre_hook(hook, with_kwargs=True)
        if given.stage is not None:
            assert given.plan.pipeline is not None
            nothing = frozenset[str]()
            # Which numbers are drawn makes no difference here.
            pipeline = replace(given.plan.pipeline, draws_random=False)
            model.pipeline = PipelineCut(pipeline, given.stage.rank, nothing, nothing, nothing)
            install_stand_ins(model)
        if given.plan.tensor is not None:
            shared = self._held.intersection(layout.parameter for layout in given.plan.tensor.layouts)
            model.shards = [HeldShard([], p, p) for name, p in fake.named_parameters() if name in shared]
            model.tensor_mode = TensorMode(model, Alone(0, lambda kind, nbytes: self._exchanges.append((kind, nbytes))))
        self._replace_step(model)

    def _recompute(self, model: ParallelModel) -> None:
        plan = self._given.recompute
        kept = frozenset(operator for overloads in resolve_ops(plan.ops).values() for operator in overloads)

        def during(name: str, _block: nn.Module) -> Any:
            return nullcontext if model.tensor_mode is None else model.tensor_mode.again(name)

        for name in plan.blocks:
            how = Recomputation(
                kept=kept,
                during=functools.partial(during, name),
                note=lambda _, out: self._results.extend(tensors_in(out)),
            )
            recompute_block(model.module.get_submodule(name), how)

    # ---- its step

    def _replace_step(self, model: ParallelModel) -> None:
        fake: Any = model.module
        original = getattr(fake, self._given.entry)
        on_shares: Callable[[Callable[[], Any]], Any] = (lambda fn: fn()) if model.tensor_mode is None else (
            model.tensor_mode.run
        )  # fmt: skip

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._seen(fake):
                if self._given.stage is None:
                    return on_shares(lambda: original(*args, **kwargs))
                return self._run_stage(model, lambda: original(*args, **kwargs), on_shares)

        object.__setattr__(fake, self._given.entry, step)

    def _run_stage(
        self, model: ParallelModel, step: Callable[[], Any], on_shares: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        stage, cut, outputs = self._given.stage, model.pipeline, self._given.outputs
        assert stage is not None and cut is not None
        program = StageProgram(cut, stage, model.module)
        program.run = run = StepRun(
            micros=[MicroBatch(step, 1.0, outputs, None)],
            receives={stage.index: stage.receives},
            sends={stage.index: stage.sends},
            training=True,
            around=lambda _micro, _is_last: nullcontext(),
            root_call=on_shares,
            device=self._given.device,
            rewritten=frozenset(cut.plan.rewritten),
        )
        received = [_received(outputs[block].leaves[leaf], self._given.device) for block, leaf in stage.receives]
        self._elsewhere += received
        result = program(*received, micro=0)
        if run.failures:
            raise run.failures[0].error
        if isinstance(result, Tensor):
            return result
        self._results += result
        # The next stage's gradients, which a sum has too, without keeping anything.
        return sum(tensor.sum() for tensor in result if tensor.requires_grad)

    @contextmanager
    def _seen(self, fake: nn.Module) -> Iterator[None]:
        """Notes what autograd keeps when the forward pass has ended, and where the step itself calls backward."""
        self._kept.clear()
        with saved_tensors_hooks(self._keep, lambda kept: self._give(fake, kept)):
            yield
        self._measure(fake)

    def _keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._kept.add(kept)
        self._grew = True
        return kept

    def _give(self, fake: nn.Module, kept: _Kept) -> Tensor:
        if self._grew:
            self._measure(fake)
        return kept.tensor

    def _measure(self, fake: nn.Module) -> None:
        self._grew = False
        own = (*fake.parameters(), *fake.buffers(), *self._elsewhere)
        keys = {storage_key(tensor) for tensor in own}
        sizes = {
            storage_key(tensor): _storage_bytes(tensor)
            for tensor in (*self._results, *(kept.tensor for kept in self._kept))
        }
        now = sum(nbytes for key, nbytes in sizes.items() if key not in keys)
        self._activation_bytes = max(self._activation_bytes, now)


def _received(leaf: Leaf, device: torch.device) -> Tensor:
    made = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return made.requires_grad_() if leaf.requires_grad else made


def _storage_bytes(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else tensor.nbytes)
