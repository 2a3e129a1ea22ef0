"""Steps without gradients of a spread module: validation, test, prediction."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_pardist.run.buffers import average_statistics_
from lightning_pardist.strategies import lightning_api, lightning_data_api
from lightning_pardist.strategies.predictions import gather_in_order
from lightning_pardist.strategies.stepping import Stepping
from lightning_pardist.strategies.turns import Turns, kept_metrics
from lightning_pardist.strategies.user_step import UserStep


class Evaluation:
    """One rank's steps in evaluation loops."""

    def __init__(self, live: Stepping) -> None:
        self._live = live
        self._turns = Turns()

    def start(self, loop: Any) -> None:
        """Makes ready for a loop, which is about to run its first batch."""
        self.free_gathered()
        average_statistics_(self._live.model)
        needs_others = self._live.model.kind == "shard"
        self._turns.start(lightning_api.evaluation_steps(loop), self._live.meshes if needs_others else None)

    def step(self, step: UserStep) -> Any:
        """Returns the output of the user's step; after a rank's last batch it joins the steps others still have."""
        live = self._live
        with live.diagnosis.inside("evaluation", live.module.trainer), torch.inference_mode(False), torch.no_grad():
            output = self._run(step, silent=False)
            joins = self._turns.left_to_join()
            if joins:
                with live.logs.silent(), kept_metrics(live.module):
                    for _ in range(joins):
                        self._run(step, silent=True)
        return output

    def _run(self, step: UserStep, *, silent: bool) -> Any:
        live = self._live
        if live.pipelining is not None:
            return live.pipelining.evaluate(step, live.strategy.root_device, silent=silent)
        with step.context():
            return live.runner.forward(lambda: step.run(live.module))

    def free_gathered(self) -> None:
        """Frees the whole parameters that were gathered for the steps of a loop."""
        self._live.runner.free_gathered()

    def gather_predictions(self) -> None:
        """Puts all ranks' predictions in order where ``Trainer.predict`` takes its own from."""
        meshes, trainer = self._live.meshes, self._live.module.trainer
        loop = trainer.predict_loop
        if meshes is None or not loop.return_predictions:
            return
        predictions = loop.predictions
        per_loader = [predictions] if loop.num_dataloaders == 1 else predictions
        for outputs, indices in zip(per_loader, lightning_data_api.predicted_indices(trainer), strict=True):
            outputs[:] = gather_in_order(outputs, indices[: len(outputs)], meshes)


def keep_inference_mode_out(trainer: Trainer) -> None:
    """Evaluates under no_grad: buffers that fully_shard makes under inference_mode could never train again."""
    for loop in lightning_api.evaluation_loops(trainer):
        if loop.inference_mode:
            loop.inference_mode = False
