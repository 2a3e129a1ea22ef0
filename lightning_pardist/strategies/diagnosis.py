"""Diagnosis inside a run: where each rank is, and in debug mode whether all are about to do the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.distributed.constants import default_pg_timeout

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.fingerprint import Fingerprints
from lightning_pardist.run.whereabouts import StuckWatch, Whereabouts
from lightning_pardist.specs.diagnosis_options import DiagnosisOptions


class Diagnosis:
    """Watches one run of one rank; does nothing on a single rank."""

    def __init__(self, options: DiagnosisOptions, timeout: timedelta | None) -> None:
        self._options = options
        self._timeout_s = (timeout or default_pg_timeout).total_seconds()
        self._where: Whereabouts | None = None
        self._watch: StuckWatch | None = None
        self._fingerprints: Fingerprints | None = None

    def start(self, model: ParallelModel) -> None:
        """Begins to watch the steps of a spread module."""
        self.close()
        if model.meshes is None:
            return
        self._where = Whereabouts(model, dist.get_rank())
        self._watch = StuckWatch(self._where, self._options.stuck_after_s or 0.9 * self._timeout_s)
        if self._options.compare_steps:
            self._fingerprints = Fingerprints(model.meshes, self._timeout_s)

    def compare(self, trainer: Trainer, batch: Any, batch_index: int) -> None:
        """In debug mode, compares what the ranks are about to do."""
        if self._fingerprints is not None:
            with self.inside("the comparison of steps", trainer, batch_index):
                self._fingerprints.compare(trainer.global_step, batch_index, batch)

    @contextmanager
    def inside(self, phase: str, trainer: Trainer, batch_index: int | None = None) -> Iterator[None]:
        """Notes the phase that the rank is in."""
        if self._where is None:
            yield
            return
        with self._where.inside(phase, step=trainer.global_step, micro_batch=batch_index):
            yield

    def at_action(self, kind: str, stage: int, micro_batch: int) -> None:
        """Notes the action of a pipeline's schedule that the rank is in."""
        if self._where is not None:
            self._where.at_action(kind, stage, micro_batch)

    def tell(self, exception: BaseException) -> None:
        """Says where the rank was when an exception ended the run, if it came from other ranks' silence."""
        if self._where is not None and is_silence(exception):
            print(f"pardist: {type(exception).__name__}: {self._where.text()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the watching."""
        if self._watch is not None:
            self._watch.close()
        if self._where is not None:
            self._where.close()
        self._where = self._watch = self._fingerprints = None


def is_silence(exception: BaseException) -> bool:
    """Returns True for what torch raises when another rank does not answer, or has gone."""
    if isinstance(exception, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(exception).lower()
    words = ("timed out", "timeout", "connection closed by peer", "connection reset", "broken pipe", "gloo")
    return isinstance(exception, RuntimeError) and any(word in text for word in words)
