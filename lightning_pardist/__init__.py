"""Lightning strategies that train an unchanged LightningModule on a torch DeviceMesh.

Importing this package registers the ``pardist_*`` names with Lightning, now or as soon as Lightning is imported. It is
also imported at the end of ``import torch`` (see ``_autoload``), so it imports nothing by itself: each public name
brings its module with it when it is first used.
"""

from __future__ import annotations

from lightning_pardist._autoload import autoload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning_pardist.base.version import __version__
    from lightning_pardist.callbacks import ParallelThroughput, PlanFile
    from lightning_pardist.describe import profile_model
    from lightning_pardist.specs.block_levers import CompileOptions, RecomputeOptions
    from lightning_pardist.specs.config import ParallelConfig
    from lightning_pardist.specs.diagnosis_options import DiagnosisOptions
    from lightning_pardist.specs.model_profile import ModelProfile
    from lightning_pardist.specs.pipeline_options import PipelineOptions
    from lightning_pardist.specs.tensor_options import TensorOptions
    from lightning_pardist.strategies.batches import data_parallel_rank_and_size
    from lightning_pardist.strategies.estimating import estimate
    from lightning_pardist.strategies.hybrid import HybridStrategy
    from lightning_pardist.torch_dtensor_api import whole_tensor

__all__ = [
    "HybridStrategy",
    "ParallelConfig",
    "RecomputeOptions",
    "CompileOptions",
    "DiagnosisOptions",
    "PipelineOptions",
    "ModelProfile",
    "profile_model",
    "TensorOptions",
    "whole_tensor",
    "estimate",
    "data_parallel_rank_and_size",
    "ParallelThroughput",
    "PlanFile",
    "__version__",
]

_HOME = {
    "HybridStrategy": "lightning_pardist.strategies.hybrid",
    "ParallelConfig": "lightning_pardist.specs.config",
    "RecomputeOptions": "lightning_pardist.specs.block_levers",
    "CompileOptions": "lightning_pardist.specs.block_levers",
    "DiagnosisOptions": "lightning_pardist.specs.diagnosis_options",
    "PipelineOptions": "lightning_pardist.specs.pipeline_options",
    "ModelProfile": "lightning_pardist.specs.model_profile",
    "profile_model": "lightning_pardist.describe",
    "TensorOptions": "lightning_pardist.specs.tensor_options",
    "whole_tensor": "lightning_pardist.torch_dtensor_api",
    "estimate": "lightning_pardist.strategies.estimating",
    "data_parallel_rank_and_size": "lightning_pardist.strategies.batches",
    "ParallelThroughput": "lightning_pardist.callbacks",
    "PlanFile": "lightning_pardist.callbacks",
    "__version__": "lightning_pardist.base.version",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


autoload()
