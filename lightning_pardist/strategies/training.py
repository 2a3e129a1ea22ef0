"""Training steps of a spread module: forward, what all ranks agree on, backward, the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_pardist.run.agree import gather_objects, maxima
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.metrics import Logged, names_digest
from lightning_pardist.strategies.optimizers import SkipGuard
from lightning_pardist.strategies.peers import check_same_batch, has_peers
from lightning_pardist.strategies.pipelining import Pipelining
from lightning_pardist.strategies.refusals import OnNonFinite
from lightning_pardist.strategies.stepping import Stepping
from lightning_pardist.strategies.user_step import UserStep


class Training:
    """One rank's training steps."""

    def __init__(self, live: Stepping, guard: SkipGuard, on_nonfinite: OnNonFinite) -> None:
        """Starts before the first step.

        Args:
            live: what steps run with.
            guard: told what all ranks agreed to drop.
            on_nonfinite: what all ranks do when the loss of any is NaN or infinite.
        """
        self.termination: lightning_api.TerminationWatch | None = None
        """Asked in every step whether this rank was told to stop; None until the strategy watches for it."""
        self._live = live
        self._guard = guard
        self._on_nonfinite = on_nonfinite
        self._batch_is_checked = not has_peers(live.meshes)

    def step(self, step: UserStep) -> Any:
        """Returns the output of the user's step, once all ranks know what all of them got."""
        live = self._live
        if live.meshes is None:
            with step.context():
                return step.run(live.module)
        if not self._batch_is_checked:
            check_same_batch(step.batch, live.meshes)
            self._batch_is_checked = True
        trainer = self._trainer()
        index = trainer.fit_loop.batch_idx
        live.diagnosis.compare(trainer, step.batch, index)
        if live.pipelining is not None:
            with live.diagnosis.inside("the schedule", trainer, index):
                return self._pipelined(live.pipelining, step)
        with live.diagnosis.inside("forward", trainer, index), live.logs.noting(step.batch) as noted, step.context():
            output = live.runner.forward(lambda: step.run(live.module))
        with live.diagnosis.inside("the agreement after forward", trainer, index):
            return self._agree_on(output, noted)

    def backward(self, closure_loss: Tensor, run: Callable[[Tensor], None]) -> Tensor:
        """Runs the backward pass of the last step, or what is left of it, and returns the loss for logging.

        Args:
            closure_loss: of the step.
            run: the precision plugin's backward pass.
        """
        live, precision = self._live, self._live.strategy.precision_plugin
        if self._guard.skips_backward:
            if live.pipelining is None:
                live.runner.skip_backward()
            else:
                live.pipelining.gradients.give_back()
            return closure_loss.detach()
        live.strategy.pre_backward(closure_loss)
        if live.pipelining is not None:
            # The schedule has done it; hooks around a backward pass run as ever.
            precision.pre_backward(closure_loss, live.module)
            live.pipelining.gradients.give_back()
            loss = closure_loss
        else:
            loss = live.runner.loss_to_backward(precision.pre_backward(closure_loss, live.module))
            with live.diagnosis.inside("backward", self._trainer()):
                with live.runner.backward():
                    run(loss)
                live.runner.after_backward()
        self._guard.saw_backward()
        loss = precision.post_backward(loss, live.module)
        live.strategy.post_backward(loss)
        return loss

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]
    ) -> Any:
        """Returns what the closure returned, after the optimizer's step if there is one to take.

        Args:
            optimizer: the user's.
            closure: forward and backward of a micro-batch.
            run: Lightning's optimizer step with a closure.
        """
        live = self._live
        if not live.module.automatic_optimization:
            result = run(closure)
            live.runner.after_optimizer_step()
            return result
        if live.meshes is None or isinstance(optimizer, torch.optim.LBFGS):
            return run(closure)
        with torch.enable_grad():
            result = closure()
        if self._guard.window_is_empty():
            return result
        with live.diagnosis.inside("the optimizer's step", self._trainer()):
            return run(lambda: result)

    def accumulating(self) -> AbstractContextManager[None]:
        """Returns the context of micro-batches after which the optimizer does not step."""
        return self._live.runner.accumulating()

    def _pipelined(self, pipelining: Pipelining, step: UserStep) -> Any:
        """Runs a whole schedule, backward passes included; ``backward`` then finds the gradients ready."""
        device = self._live.strategy.root_device
        done = pipelining.forward_backward(step, device)
        combined, others = pipelining.replay(done, device)
        result = None if done.failures else done.output
        output = self._agree_on(result, combined, failed=lambda: pipelining.raise_failures(done, step.entry))
        pipelining.log_here(others, device)
        pipelining.gradients.keep(window_ends=self._live.runner.window_ends, skip=self._guard.skips_backward)
        return output

    def _agree_on(self, output: Any, noted: list[Logged], failed: Callable[[], None] | None = None) -> Any:
        """Returns the step's output once all ranks know what all of them got, and logs what they logged.

        Args:
            output: of the user's step.
            noted: what it logged.
            failed: raises on all ranks what failed on a stage of a pipeline; called by all if it did on any.
        """
        meshes, device = self._live.meshes, self._live.strategy.root_device
        assert meshes is not None
        automatic = self._live.module.automatic_optimization
        digest = names_digest(noted)
        missing = automatic and output is None
        nonfinite = self._on_nonfinite != "propagate" and _is_nonfinite(output)
        terminated = self.termination is not None and self.termination.pending
        any_missing, any_nonfinite, any_terminated, highest, lowest = maxima(
            [missing, nonfinite, terminated, digest, -digest], meshes
        )
        if any_missing and failed is not None:
            failed()
        if any_terminated and self.termination is not None:
            self.termination.agree()
        self._live.logs.replay(noted, meshes, device, same_names=highest == -lowest)
        if any_nonfinite and self._on_nonfinite == "raise":
            ranks = [r for r, bad in enumerate(gather_objects(nonfinite, meshes)) if bad]
            raise FloatingPointError(
                f"the loss is not finite on rank(s) {ranks}; the strategy's on_nonfinite_loss='raise'"
            )
        self._guard.decide(skip=bool(any_missing or any_nonfinite))
        if output is None and automatic:
            # Lightning refuses None on several ranks, for it cannot know that they agreed.
            return torch.full((), float("nan"), device=device, requires_grad=True)
        return output

    def _trainer(self) -> Trainer:
        return self._live.module.trainer


def _is_nonfinite(output: Any) -> bool:
    loss = output.get("loss") if isinstance(output, dict) else output
    return isinstance(loss, Tensor) and not bool(torch.isfinite(loss.detach()).all())
