"""What HybridStrategy refuses before anything is set up."""

from __future__ import annotations

from typing import Literal, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging

from lightning_pardist.base.errors import message
from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.strategies import lightning_api

OnNonFinite = Literal["propagate", "skip", "raise"]


def check_on_nonfinite(value: OnNonFinite) -> OnNonFinite:
    """Returns the word if it is one.

    Raises:
        ValueError: otherwise.
    """
    if value in get_args(OnNonFinite):
        return value
    raise ValueError(
        message(
            f"on_nonfinite_loss must be one of {', '.join(get_args(OnNonFinite))}.",
            got=f"on_nonfinite_loss={value!r}",
            source="the strategy's arguments",
            change="'propagate' does what one process does; 'skip' drops the step on all ranks; 'raise' stops",
        )
    )


def refuse_compiled(module: LightningModule) -> None:
    """Refuses a LightningModule that ``torch.compile`` was called on as a whole.

    Raises:
        ValueError: says what to compile instead.
    """
    if not lightning_api.is_compiled(module):
        return
    raise ValueError(
        message(
            "The LightningModule itself must not be compiled: sharding hooks sit between its parts.",
            got=f"torch.compile({type(module).__name__})",
            source="the model passed to the Trainer",
            change="pass the plain module, and HybridStrategy(compile=True), which compiles each of its blocks",
        )
    )


def check_pipeline(config: ParallelConfig, options: PipelineOptions | None) -> PipelineOptions:
    """Returns the options of pipeline parallelism.

    Raises:
        ValueError: for options without a pipeline, or a combination that this version does not have.
    """
    if config.pipeline_parallel_size == 1:
        if options is not None:
            raise ValueError(
                message(
                    "Options of pipeline parallelism need stages to act on.",
                    got="pipeline=PipelineOptions(...), pipeline_parallel_size=1",
                    source="the strategy's arguments",
                    change="set pipeline_parallel_size, or leave pipeline out",
                )
            )
        return PipelineOptions()
    if config.cpu_offload:
        raise ValueError(
            message(
                "Stages keep their parameters whole through a step, so they cannot be kept in host memory.",
                got=f"cpu_offload=True, pipeline_parallel_size={config.pipeline_parallel_size!r}",
                source="the strategy's arguments",
                change="set cpu_offload=False",
            )
        )
    return options or PipelineOptions()


def refuse_averages_of_parts(trainer: Trainer, sizes: AxisSizes) -> None:
    """Refuses Lightning's averages of weights, and pruning, where a rank holds a part of the model only.

    Averages copy the whole module before it is spread and then add up live weights and copies one by one, which are
    shards, or another stage's, by then. Pruning puts masks of whole parameters beside them.

    Raises:
        ValueError: names the callback and the axes.
    """
    axes = ("pipeline_parallel", "tensor_parallel", "data_parallel_shard")
    cut = {axis: size for axis, size in sizes.as_dict().items() if axis in axes and size > 1}
    averaging = [c for c in lightning_api.callbacks(trainer) if isinstance(c, _AVERAGING)]
    if not cut or not averaging:
        return
    raise ValueError(
        message(
            "Lightning's callbacks that average or prune weights need the whole model on every rank.",
            got=f"{type(averaging[0]).__name__}, {', '.join(f'{axis}={size}' for axis, size in cut.items())}",
            source="Trainer(callbacks=...), and the strategy's sizes",
            change="use zero_stage=0 (whole copies), leave the callback out, or work on saved checkpoints afterwards",
        )
    )


_AVERAGING = (WeightAveraging, StochasticWeightAveraging, ModelPruning)


def refuse_under_pipeline(module: LightningModule, sizes: AxisSizes, config: ParallelConfig) -> None:
    """Refuses what cannot be run as a pipeline, before anything is set up.

    Raises:
        ValueError: names it.
    """
    if sizes.pipeline_parallel == 1:
        return
    if not module.automatic_optimization:
        raise ValueError(
            message(
                "A pipeline runs forward and backward passes in an order of its own, so it needs automatic "
                "optimization.",
                got=f"{type(module).__name__} with automatic_optimization=False",
                source="the LightningModule",
                change="return the loss from training_step, or use the data axes only",
            )
        )
