"""HybridStrategy: Lightning's hooks, each of them a call into a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.step import StepRunner
from lightning_pardist.specs.block_levers import CompileOptions, RecomputeOptions, check_recompute, compile_options
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.specs.config import ParallelConfig, Size
from lightning_pardist.specs.diagnosis_options import DiagnosisOptions
from lightning_pardist.specs.options import refuse_compile_on_shares, refuse_idle_options
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.strategies import lightning_api, lightning_data_api
from lightning_pardist.strategies.checkpoint_hooks import CheckpointHooks, refuse_checkpoint_io
from lightning_pardist.strategies.checkpointing import CheckpointKeeper
from lightning_pardist.strategies.dealing import Dealing
from lightning_pardist.strategies.diagnosis import Diagnosis
from lightning_pardist.strategies.evaluation import Evaluation, keep_inference_mode_out
from lightning_pardist.strategies.metrics import StepLogs
from lightning_pardist.strategies.optimizers import SkipGuard, check_optimizers, watch_toggles
from lightning_pardist.strategies.peers import has_peers, share_generators
from lightning_pardist.strategies.pipelining import Pipelining
from lightning_pardist.strategies.precision import check_norm_type, counted_elsewhere, mesh_precision
from lightning_pardist.strategies.refusals import (
    OnNonFinite,
    check_on_nonfinite,
    check_pipeline,
    refuse_averages_of_parts,
    refuse_compiled,
    refuse_under_pipeline,
)
from lightning_pardist.strategies.spread import SpreadRequest, announce, spread
from lightning_pardist.strategies.stepping import Stepping
from lightning_pardist.strategies.training import Training
from lightning_pardist.strategies.user_step import UserStep


class HybridStrategy(CheckpointHooks):
    """Trains an unchanged LightningModule on a device mesh.

    Args:
        data_parallel_replicate_size: copies of the model; ``"auto"`` is one per node.
        data_parallel_shard_size: ranks that share one copy; ``"auto"`` is what the other axes leave.
        tensor_parallel_size: ranks that share each matrix; ``"auto"`` is all ranks of a node, 2 if stages share a
            single node.
        pipeline_parallel_size: ranks that the block stack is cut over; ``"auto"`` is one per node if there are
            several, else one per device.
        context_parallel_size: ranks that share one sequence (1 in this version).
        expert_parallel_size: ranks that share the experts (1 in this version).
        zero_stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        cpu_offload: keep sharded state in host memory.
        fsdp_units: class names or module name patterns that replace the derived sharding units.
        recompute: which activations are computed again in the backward pass instead of being kept.
        compile: compile each block, before it is sharded; True, or options of torch.compile.
        gradient_clip_norm_type: p of the norm that ``Trainer(gradient_clip_val=...)`` clips by.
        on_nonfinite_loss: what all ranks do when the loss of any is NaN or infinite: ``"propagate"`` it as one process
            would (no cost), ``"skip"`` the step or ``"raise"`` (both wait for the loss on the device).
        gather_predictions: ``Trainer.predict`` returns all predictions in order on every rank instead of each rank's.
        sample_batch: a batch to describe the module with, if the training data cannot give one.
        print_plan: show the plan as a table at the start, on rank 0.
        checkpoint: how checkpoints are written and checked.
        diagnosis: how long ranks wait for each other, and what they compare in debug mode.
        tensor: how the matrices of a block are shared: an own plan, sequence parallel, what is checked.
        pipeline: how the block stack is cut, and the schedule of its stages.
        accelerator: as in Lightning; normally the Trainer's.
        parallel_devices: the devices of this node's ranks; normally the Trainer's.
        cluster_environment: who starts processes and how they meet; found by Lightning.
        checkpoint_io: refused, since checkpoints are written by all ranks; see ``checkpoint``.
        precision_plugin: as in Lightning; normally ``Trainer(precision=...)``.
        process_group_backend: such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``; default by device.
        timeout: bound on every collective.

    Raises:
        ValueError: for sizes that no world could satisfy, or options that exclude each other.
    """

    strategy_name = "pardist_hybrid"
    # From ``setup`` on.
    _training: Training
    _evaluation: Evaluation

    def __init__(
        self,
        data_parallel_replicate_size: Size = "auto",
        data_parallel_shard_size: Size = "auto",
        tensor_parallel_size: Size = 1,
        pipeline_parallel_size: Size = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        zero_stage: Literal[0, 1, 2, 3] = 3,
        cpu_offload: bool = False,
        fsdp_units: Sequence[str] | None = None,
        recompute: RecomputeOptions | None = None,
        compile: bool | CompileOptions = False,
        gradient_clip_norm_type: float = 2.0,
        on_nonfinite_loss: OnNonFinite = "propagate",
        gather_predictions: bool = False,
        sample_batch: Any = None,
        print_plan: bool = True,
        checkpoint: CheckpointOptions | None = None,
        diagnosis: DiagnosisOptions | None = None,
        tensor: TensorOptions | None = None,
        pipeline: PipelineOptions | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        config = ParallelConfig(
            data_parallel_replicate_size=data_parallel_replicate_size,
            data_parallel_shard_size=data_parallel_shard_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_parallel_size=expert_parallel_size,
            zero_stage=zero_stage,
            cpu_offload=cpu_offload,
            fsdp_units=fsdp_units if isinstance(fsdp_units, str) else tuple(fsdp_units or ()),  # type: ignore[arg-type]
        )
        self._norm_type = check_norm_type(gradient_clip_norm_type)
        refuse_checkpoint_io(checkpoint_io)
        refuse_idle_options(tensor, name="tensor", size=tensor_parallel_size)
        self.tensor_options = tensor or TensorOptions()
        self.pipeline_options = check_pipeline(config, pipeline)
        super().__init__(
            config,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
        )
        self._on_nonfinite = check_on_nonfinite(on_nonfinite_loss)
        self._gather_predictions = gather_predictions
        self._sample_batch = sample_batch
        self.recompute = check_recompute(recompute)
        self.compile = compile_options(compile)
        refuse_compile_on_shares(tensor=tensor_parallel_size, compile=self.compile)
        self._print_plan = print_plan
        self._parallel_model: ParallelModel | None = None
        self._logs: StepLogs | None = None
        self._train_loaders: lightning_data_api.TrainLoaders | None = None
        self._guard = SkipGuard()
        self._keeper = CheckpointKeeper(checkpoint or CheckpointOptions(), self._asked)
        self.diagnosis_options = diagnosis or DiagnosisOptions()
        self._diagnosis = Diagnosis(self.diagnosis_options, timeout)
        self._undo: list[Callable[[], None]] = []
        self._dealing = Dealing(self, self._keeper.restorer)

    # ---- what was done ---------------------------------------------------------------------------------------------

    @property
    def parallel_model(self) -> ParallelModel | None:
        """The spread module with its plan; None before ``setup``."""
        return self._parallel_model

    @property
    def plan(self) -> ParallelPlan | None:
        """What was done to the module; None before ``setup``."""
        return None if self._parallel_model is None else self._parallel_model.plan

    # ---- set-up --------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            plugin = mesh_precision(
                plugin, lambda: self._meshes, self._norm_type, lambda: counted_elsewhere(self._parallel_model)
            )
        self._precision_plugin = plugin

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._attached

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # The Trainer sets this first of all, just before its own check of compiled modules, which knows no way out.
        if module is not None:
            refuse_compiled(module)
        self._attached = module

    @override
    def connect(self, model: LightningModule) -> None:
        if self._logs is not None:
            self._logs.uninstall()
        self._logs = StepLogs(model)
        super().connect(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        keep_inference_mode_out(trainer)
        module = self.lightning_module
        if self._meshes is not None:
            refuse_under_pipeline(module, self._meshes.sizes, self.config)
            if trainer.state.fn == TrainerFn.FITTING:
                refuse_averages_of_parts(trainer, self._meshes.sizes)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._train_loaders = lightning_data_api.TrainLoaders(trainer)
            self._undo.append(self._train_loaders.uninstall)
        loaders = self._train_loaders if fitting else None
        is_new = self._parallel_model is None or self._parallel_model.module is not module
        self._parallel_model = spread(module, self._spread_request(loaders))
        live = self._new_stepping(module, self._parallel_model)
        self._training = Training(live, self._guard, self._on_nonfinite)
        self._evaluation = Evaluation(live)
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._parallel_model)
        if self._meshes is not None and has_peers(self._meshes):
            share_generators(self._meshes)
        self._keeper.attach(module, self._parallel_model, self.optimizers, loaders)
        self.setup_precision_plugin()
        if fitting:
            if not self.config.cpu_offload:
                lightning_api.optimizers_to_device(self.optimizers, self.root_device)
            self._undo.append(self._guard.install(module, self.lr_scheduler_configs))
            self._undo.append(watch_toggles(module, live.runner.follow_toggle))
        if self._meshes is not None:
            self._undo.append(lightning_api.before_epoch_metrics(trainer, live.sync_epoch_metrics))
            self._undo.append(lightning_data_api.before_dataloader(trainer, lambda dl: self._dealing.see(dl, trainer)))
            self._training.termination = lightning_api.TerminationWatch(trainer)
            self._undo.append(self._training.termination.uninstall)
        self._diagnosis.start(self._parallel_model)
        if self._print_plan and self.is_global_zero and (is_new or fitting):
            announce(self._parallel_model, self.optimizers)

    def _spread_request(self, loaders: lightning_data_api.TrainLoaders | None) -> SpreadRequest:
        return SpreadRequest(
            config=self.config,
            meshes=self._meshes,
            device=self.root_device,
            precision=self.precision_plugin,
            layer_sync=self._layer_sync is not None,
            sample_batch=self._sample_batch,
            loaders=loaders,
            tensor=self.tensor_options,
            pipeline=self.pipeline_options,
            recompute=self.recompute,
            compile=self.compile,
        )

    def _new_stepping(self, module: LightningModule, model: ParallelModel) -> Stepping:
        assert self._logs is not None
        runner = StepRunner(model, manual_optimization=not module.automatic_optimization)
        pipelining = None
        if model.pipeline is not None:
            drops = self._on_nonfinite == "skip"
            pipelining = Pipelining(module, model, self.pipeline_options, self._logs, keeps_apart=drops)
            pipelining.tell_actions(self._diagnosis.at_action)
        return Stepping(
            strategy=self,
            module=module,
            meshes=self._meshes,
            model=model,
            runner=runner,
            logs=self._logs,
            diagnosis=self._diagnosis,
            pipelining=pipelining,
        )

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the module reached its device piece by piece while it was spread."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Tensors stay on the host, or on meta if asked: each unit reaches the device when it is cut.
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._dealing.process(dataloader, self._trainer(), self._train_loaders, in_step=self._kind() == "shard")

    # ---- steps ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.step(UserStep("training_step", args, kwargs, self.precision_plugin.train_step_context))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module, plugin = self._module(), self.precision_plugin
        return self._training.backward(
            closure_loss, lambda loss: plugin.backward(loss, module, optimizer, *args, **kwargs)
        )

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = super().optimizer_step
        return self._training.optimizer_step(
            optimizer, closure, lambda closure: step(optimizer, closure, model, **kwargs)
        )

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._training.accumulating():
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step(UserStep("validation_step", args, kwargs, self.precision_plugin.val_step_context))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step(UserStep("test_step", args, kwargs, self.precision_plugin.test_step_context))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation.step(UserStep("predict_step", args, kwargs, self.precision_plugin.predict_step_context))

    # ---- between steps -------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._evaluation.start(lightning_api.running_evaluation(self._trainer()))

    @override
    def on_test_start(self) -> None:
        self._evaluation.start(lightning_api.running_evaluation(self._trainer()))

    @override
    def on_predict_start(self) -> None:
        self._evaluation.start(self._trainer().predict_loop)

    @override
    def on_validation_end(self) -> None:
        self._evaluation.free_gathered()

    @override
    def on_test_end(self) -> None:
        self._evaluation.free_gathered()

    @override
    def on_predict_end(self) -> None:
        self._evaluation.free_gathered()
        if self._gather_predictions:
            self._evaluation.gather_predictions()

    # ---- the end -------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        with self._diagnosis.inside("saving a checkpoint", self._trainer()):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._diagnosis.tell(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._diagnosis.close()
        try:
            self._keeper.close()  # raises what a save that was under way failed with
        finally:
            while self._undo:
                self._undo.pop()()
            if self._logs is not None:
                self._logs.uninstall()
                self._logs = None
            assert self.cluster_environment is not None and self.accelerator is not None
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    def _kind(self) -> str:
        return "none" if self._parallel_model is None else self._parallel_model.kind
