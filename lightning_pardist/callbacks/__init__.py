"""Optional Lightning callbacks for runs with this package's strategies."""

from __future__ import annotations

from lightning_pardist.callbacks.plan_file import PlanFile
from lightning_pardist.callbacks.throughput import ParallelThroughput

__all__ = ["ParallelThroughput", "PlanFile"]
