"""STEP 3: a plan becomes hooks and shards on the live module, in place."""

from __future__ import annotations

from lightning_pardist.apply.checks import check_modules
from lightning_pardist.apply.order import apply_plan
from lightning_pardist.apply.pipeline import install_stand_ins
from lightning_pardist.apply.sync_batch_norm import convert_batch_norms
from lightning_pardist.apply.tensor_parallel import TensorCutter, local_part

__all__ = ["TensorCutter", "apply_plan", "check_modules", "convert_batch_norms", "install_stand_ins", "local_part"]
