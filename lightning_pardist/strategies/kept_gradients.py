"""Gradients of a schedule, kept off the parameters while Lightning clears those: it does so before ``backward``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.pipeline import PipelineRunner
from lightning_pardist.torch_dtensor_api import local_tensor

_Kept = Sequence[tuple[nn.Parameter, Tensor | None]]


class KeptGradients:
    """The gradients of one rank's parameters, from the end of a schedule until ``backward``."""

    def __init__(self, model: ParallelModel, runner: PipelineRunner, *, keeps_apart: bool) -> None:
        """Starts with none.

        Args:
            model: the spread module.
            runner: finishes gradients over ranks.
            keeps_apart: a step's gradients must be droppable, so they are not added to earlier ones at once.
        """
        self._model = model
        self._runner = runner
        self._keeps_apart = keeps_apart
        self._kept: _Kept = []
        self._earlier: _Kept = []

    def before_step(self, *, is_first: bool) -> None:
        """Takes gradients of earlier micro-steps off the parameters, where the next step's must not be added to them.

        Args:
            is_first: a window begins, in which earlier gradients have no part.
        """
        self._earlier = self._put_aside(drop=is_first) if is_first or self._keeps_apart else []

    def keep(self, *, window_ends: bool, skip: bool) -> None:
        """Finishes a step's gradients and takes them off the parameters.

        Args:
            window_ends: the optimizer steps next.
            skip: all ranks agreed to drop the step.
        """
        if skip:
            self._runner.drop_gradients()
            self._put_aside(drop=True)
            self._kept = self._earlier
            if window_ends:
                self._restore(self._kept)
                self._runner.finish_gradients(reduce_shards=False, window_ends=True)
                self._kept = self._put_aside(drop=False)
            return
        for parameter, gradient in self._earlier:
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:  # in place on this rank's part: torch adds no DTensors of placements that it does not know
                local_tensor(parameter.grad).add_(local_tensor(gradient))
        keeps_whole = self._model.plan.data_parallel.zero_stage == 1 and not self._keeps_apart
        self._runner.finish_gradients(reduce_shards=window_ends or not keeps_whole, window_ends=window_ends)
        self._kept = self._put_aside(drop=False)

    def give_back(self) -> None:
        """Puts the gradients back where Lightning, callbacks and the optimizer look for them."""
        self._restore(self._kept)
        self._kept = []

    def _put_aside(self, *, drop: bool) -> _Kept:
        held = [p for name, p in self._model.module.named_parameters() if name not in self._model.absent]
        kept = [] if drop else [(p, p.grad) for p in held]
        for parameter in held:
            parameter.grad = None
        return kept

    @staticmethod
    def _restore(kept: _Kept) -> None:
        for parameter, gradient in kept:
            parameter.grad = gradient
