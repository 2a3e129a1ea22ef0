"""The way from a module to its pipeline plan: described by rank 0, planned by all, remembered for later steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torchmetrics import Metric

from lightning_pardist.base.log import get_logger
from lightning_pardist.describe.blame import blame
from lightning_pardist.describe.skeleton import Skeleton, Step
from lightning_pardist.mesh import Meshes
from lightning_pardist.plan.pipeline import plan_pipeline
from lightning_pardist.plan.pipeline_input import PipelineInput, refusal
from lightning_pardist.run.agree import gather_objects
from lightning_pardist.specs.model_profile import ModelProfile
from lightning_pardist.specs.module_table import ModuleTable
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import Dataflow, PipelinePlan
from lightning_pardist.strategies import lightning_data_api
from lightning_pardist.strategies.pipeline_forecast import Forecast, new_skeleton, remember_forecast
from lightning_pardist.strategies.precision import precision_plan
from lightning_pardist.strategies.sample import Sample
from lightning_pardist.strategies.schedules import schedule_table

log = get_logger(__name__)


class Staging:
    """Makes the pipeline plan of one module; without stages every method does nothing."""

    def __init__(
        self,
        module: LightningModule,
        options: PipelineOptions,
        meshes: Meshes | None,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._module = module
        self._options = options
        self._meshes = meshes if meshes is not None and meshes.pipeline_control is not None else None
        self._device = device
        self._precision = precision
        self._skeleton: Skeleton | None = None
        self._flow: Dataflow | None = None

    def describe(self, profile: ModelProfile, sample: Sample | None) -> None:
        """Finds out how values flow between blocks; every rank calls it, before the module is changed.

        Raises:
            ValueError: on all ranks, if the step cannot be run on fake tensors, or blocks are compiled.
        """
        if self._meshes is None:
            return
        self._refuse_compiled(profile)
        if sample is None or profile.source != "fake_run":
            raise cannot_stage(
                self._module,
                profile.fallback_reason or "there is no sample batch",
                "mend the line that is named, or pass sample_batch=... to the strategy",
            )
        with lightning_data_api.transfer_hooks_of_data_module(self._module):  # the copy keeps them
            sharded = self._meshes.sizes.data_parallel_shard > 1
            self._skeleton = new_skeleton(self._module, self._device, precision_plan(self._precision, sharded=sharded))
        blocks = [block.name for block in profile.called_blocks()]
        found: Dataflow | str = ""
        if torch.distributed.get_rank() == 0:
            found = flow_or_reason(self._skeleton, blocks, self._precision.convert_input(sample.batch))
        flow = gather_objects(found, self._meshes)[0]
        if isinstance(flow, str):
            raise cannot_stage(self._module, flow, "mend the line that is named")
        self._flow = flow

    def _refuse_compiled(self, profile: ModelProfile) -> None:
        """Compiled code asks nobody whether a block is here."""
        names = [block.name for block in profile.blocks()] if profile.source == "fake_run" else []
        blocks = {self._module.get_submodule(name) for name in names}
        for name, part in self._module.named_modules():
            if not (hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None):
                continue
            if not blocks or not blocks.isdisjoint(part.modules()):
                raise refusal(
                    "Blocks of a pipeline and what is around them must not be compiled: at every call of a block its "
                    "stage decides.",
                    got=f"{name} was compiled",
                    source=type(self._module).__name__,
                    change="leave out torch.compile there, or compile what is inside the blocks",
                )

    def plan(self, table: ModuleTable, profile: ModelProfile) -> PipelinePlan | None:
        """Returns the pipeline's plan, None without stages."""
        if self._meshes is None:
            return None
        assert self._flow is not None
        plan = plan_pipeline(
            PipelineInput(
                table=table,
                profile=profile,
                dataflow=self._flow,
                options=self._options,
                ranks=self._meshes.sizes.pipeline_parallel,
                schedules=schedule_table(self._options),
            )
        )
        if plan.num_microbatches < plan.ranks and torch.distributed.get_rank() == 0:
            log.warning(
                "%d micro-batch(es) for a pipeline of %d ranks leave %.0f %% of the time idle under %s; use larger "
                "batches, PipelineOptions(num_microbatches=%d) or more, or fewer stages",
                plan.num_microbatches, plan.ranks, 100 * plan.idle_share, plan.schedule, 4 * plan.ranks,
            )  # fmt: skip
        return plan

    def remember(self) -> None:
        """Keeps what later steps are foretold from; metrics count over data ranks, not over stages."""
        if self._meshes is None:
            return
        assert self._skeleton is not None and self._flow is not None
        remember_forecast(self._module, Forecast(self._skeleton, self._flow))
        for child in self._module.modules():
            if isinstance(child, Metric):
                child.process_group = self._meshes.data_parallel_group


def flow_or_reason(skeleton: Skeleton, blocks: Sequence[str], batch: Any) -> Dataflow | str:
    """Returns how values flow in a training step, or what ended its run on fake tensors."""
    try:
        flow, _ = skeleton.dataflow(blocks, Step("training_step", batch, (0,), is_transferred=False))
    except Exception as error:  # the user's code; every rank must hear of it
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]} at {blame(error)}"
    return flow


def cannot_stage(module: nn.Module, got: str, change: str) -> ValueError:
    """Returns the refusal of a module whose step could not be run on fake tensors."""
    return refusal(
        "A module is cut into stages by what one step on fake tensors shows, which must run to its end.",
        got=got,
        source=f"{type(module).__name__}.training_step",
        change=change,
    )
