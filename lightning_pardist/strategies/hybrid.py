"""HybridStrategy: Lightning's hooks, each of them a call into a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.agree import gather_objects, maxima
from lightning_pardist.run.buffers import average_statistics_
from lightning_pardist.run.step import StepRunner
from lightning_pardist.specs.block_levers import CompileOptions, RecomputeOptions, check_recompute, compile_options
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from lightning_pardist.specs.config import ParallelConfig, Size
from lightning_pardist.specs.diagnosis_options import DiagnosisOptions
from lightning_pardist.specs.options import refuse_combinations, refuse_idle_options
from lightning_pardist.specs.parallel_plan import ParallelPlan
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.strategies import lightning_api
from lightning_pardist.strategies.batches import (
    agree_on_length,
    check_enough_to_predict,
    check_none_empty,
    keep_order,
)
from lightning_pardist.strategies.checkpoint_hooks import CheckpointHooks, refuse_checkpoint_io
from lightning_pardist.strategies.checkpointing import CheckpointKeeper
from lightning_pardist.strategies.diagnosis import Diagnosis
from lightning_pardist.strategies.metrics import Logged, StepLogs, names_digest, sync_epoch_metrics
from lightning_pardist.strategies.optimizers import SkipGuard, check_optimizers, watch_toggles
from lightning_pardist.strategies.peers import check_same_batch, has_peers, share_generators
from lightning_pardist.strategies.pipelining import Pipelining, UserStep
from lightning_pardist.strategies.precision import check_norm_type, mesh_precision
from lightning_pardist.strategies.predictions import gather_in_order
from lightning_pardist.strategies.refusals import (
    OnNonFinite,
    check_on_nonfinite,
    check_pipeline,
    refuse_averages_of_parts,
    refuse_compiled,
    refuse_under_pipeline,
    refuse_under_tensor_axis,
)
from lightning_pardist.strategies.spread import SpreadRequest, announce, spread
from lightning_pardist.strategies.turns import Turns, deal_each_once, has_own_dealing, kept_metrics


class HybridStrategy(CheckpointHooks):
    """Trains an unchanged LightningModule on a device mesh.

    Args:
        data_parallel_replicate_size: copies of the model; ``"auto"`` is one per node.
        data_parallel_shard_size: ranks that share one copy; ``"auto"`` is what the other axes leave.
        tensor_parallel_size: ranks that share each matrix; ``"auto"`` is all ranks of a node.
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
        self._tensor_options = tensor or TensorOptions()
        self._pipeline_options = check_pipeline(config, pipeline)
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
        refuse_combinations(
            tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, recompute=recompute, compile=self.compile
        )
        self._print_plan = print_plan
        self._parallel_model: ParallelModel | None = None
        self._runner: StepRunner | None = None
        self._logs: StepLogs | None = None
        self._train_loaders: lightning_api.TrainLoaders | None = None
        self._guard = SkipGuard()
        self._keeper = CheckpointKeeper(checkpoint or CheckpointOptions(), self._asked)
        self.diagnosis_options = diagnosis or DiagnosisOptions()
        self._diagnosis = Diagnosis(self.diagnosis_options, timeout)
        self._termination: lightning_api.TerminationWatch | None = None
        self._undo: list[Callable[[], None]] = []
        self._turns = Turns()
        self._is_dealt = False
        self._batch_is_checked = True
        self._pipelining: Pipelining | None = None

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
        self._precision_plugin = (
            None if plugin is None else mesh_precision(plugin, lambda: self._meshes, self._norm_type, self._uncounted)
        )

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
        self._keep_inference_mode_out(trainer)
        module = self.lightning_module
        if self._meshes is not None:
            refuse_under_pipeline(module, self._meshes.sizes, self.config)
            refuse_under_tensor_axis(module, self._meshes.sizes)
            if trainer.state.fn == TrainerFn.FITTING:
                refuse_averages_of_parts(trainer, self._meshes.sizes)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._train_loaders = lightning_api.TrainLoaders(trainer)
            self._undo.append(self._train_loaders.uninstall)
        request = SpreadRequest(
            config=self.config,
            meshes=self._meshes,
            device=self.root_device,
            precision=self.precision_plugin,
            layer_sync=self._layer_sync is not None,
            sample_batch=self._sample_batch,
            loaders=self._train_loaders if fitting else None,
            tensor=self._tensor_options,
            pipeline=self._pipeline_options,
            recompute=self.recompute,
            compile=self.compile,
        )
        is_new = self._parallel_model is None or self._parallel_model.module is not module
        self._parallel_model = spread(module, request)
        self._runner = StepRunner(self._parallel_model, manual_optimization=not module.automatic_optimization)
        self._pipelining = self._new_pipelining(module)
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._parallel_model)
        self._batch_is_checked = not has_peers(self._meshes)
        if self._meshes is not None and has_peers(self._meshes):
            share_generators(self._meshes)
        self._keeper.attach(module, self._parallel_model, self.optimizers, self._train_loaders if fitting else None)
        self.setup_precision_plugin()
        if fitting:
            if not self.config.cpu_offload:
                lightning_api.optimizers_to_device(self.optimizers, self.root_device)
            self._undo.append(self._guard.install(module, self.lr_scheduler_configs))
            self._undo.append(watch_toggles(module, self._runner.follow_toggle))
        if self._meshes is not None:
            self._undo.append(lightning_api.before_epoch_metrics(trainer, self._sync_epoch_metrics))
            self._undo.append(lightning_api.before_dataloader(trainer, self._before_dealing))
            self._termination = lightning_api.TerminationWatch(trainer)
            self._undo.append(self._termination.uninstall)
        self._diagnosis.start(self._parallel_model)
        if self._print_plan and self.is_global_zero and (is_new or fitting):
            announce(self._parallel_model, self.optimizers)

    def _new_pipelining(self, module: LightningModule) -> Pipelining | None:
        assert self._parallel_model is not None and self._logs is not None
        if self._parallel_model.pipeline is None:
            return None
        keeps_apart = self._on_nonfinite == "skip"
        return Pipelining(module, self._parallel_model, self._pipeline_options, self._logs, keeps_apart=keeps_apart)

    def _uncounted(self) -> frozenset[int]:
        """Ids of the parameters whose gradients another pipeline stage counts."""
        model = self._parallel_model
        if model is None or not model.tied_across_stages:
            return frozenset()
        return frozenset(id(p) for n, p in model.module.named_parameters() if n in model.tied_across_stages)

    def _keep_inference_mode_out(self, trainer: Trainer) -> None:
        """Evaluates under no_grad: buffers that fully_shard makes under inference_mode could never train again."""
        for loop in lightning_api.evaluation_loops(trainer):
            if loop.inference_mode:
                loop.inference_mode = False

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the module reached its device piece by piece while it was spread."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Tensors stay on the host, or on meta if asked: each unit reaches the device when it is cut.
        with torch.device("meta" if empty_init else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    def _before_dealing(self, dataloader: object) -> None:
        """Sees a loader as the user made it, just before Lightning deals its samples."""
        self._is_dealt = lightning_api.deals_samples(self._trainer()) and not has_own_dealing(dataloader)
        if self._trainer().predicting and self._is_dealt:
            check_enough_to_predict(dataloader, self.data_parallel_size)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer()
        if has_peers(self._meshes):
            lightning_api.seed_workers_by(dataloader, self.data_parallel_rank)
        if trainer.training and self._train_loaders is not None:
            keep_order(dataloader, self._train_loaders)
            dataloader = self._keeper.restorer.continued(
                dataloader, rank=self.data_parallel_rank, step=trainer.global_step
            )
        if self._meshes is None:
            return dataloader
        if not trainer.training and self._is_dealt:
            deal_each_once(dataloader)
        check_none_empty(dataloader, self._meshes)
        if (trainer.predicting or (self._is_dealt and not trainer.training)) and sized_len(dataloader) is not None:
            return dataloader  # ranks with a batch less join the others' steps, see _evaluate
        if not trainer.training and self._kind() != "shard":
            return dataloader  # evaluating whole copies needs no other rank
        return agree_on_length(dataloader, self._meshes, training=trainer.training)

    # ---- steps ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module, runner = self._module(), self._live_runner()
        if self._meshes is None:
            with self.precision_plugin.train_step_context():
                return module.training_step(*args, **kwargs)
        assert self._logs is not None
        if self._pipelining is not None:
            return self._pipelined_step(self._pipelining, args, kwargs)
        batch = args[0] if args else next(iter(kwargs.values()), None)
        if not self._batch_is_checked:
            check_same_batch(batch, self._meshes)
            self._batch_is_checked = True
        index = self._trainer().fit_loop.batch_idx
        self._diagnosis.compare(self._trainer(), batch, index)
        with (
            self._diagnosis.inside("forward", self._trainer(), index),
            self._logs.noting(batch) as noted,
            self.precision_plugin.train_step_context(),
        ):
            output = runner.forward(lambda: module.training_step(*args, **kwargs))
        with self._diagnosis.inside("the agreement after forward", self._trainer(), index):
            return self._agree_on(output, noted)

    def _pipelined_step(self, pipelining: Pipelining, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a whole schedule, backward passes included; ``backward`` then finds the gradients ready."""
        step = UserStep("training_step", args, kwargs, self.precision_plugin.train_step_context)
        done = pipelining.forward_backward(step, self.root_device)
        combined, others = pipelining.replay(done, self.root_device)
        result = None if done.failures else done.output
        output = self._agree_on(result, combined, failed=lambda: pipelining.raise_failures(done, step.entry))
        pipelining.log_here(others, self.root_device)
        pipelining.keep_gradients(window_ends=self._live_runner().window_ends, skip=self._guard.skips_backward)
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module, runner = self._module(), self._live_runner()
        if self._guard.skips_backward:
            if self._pipelining is None:
                runner.skip_backward()
            else:
                self._pipelining.give_back_gradients()
            return closure_loss.detach()
        self.pre_backward(closure_loss)
        if self._pipelining is not None:
            # The schedule has done it; hooks around a backward pass run as ever.
            self.precision_plugin.pre_backward(closure_loss, module)
            self._pipelining.give_back_gradients()
            self._guard.saw_backward()
            loss = self.precision_plugin.post_backward(closure_loss, module)
            self.post_backward(loss)
            return loss
        loss = runner.loss_to_backward(self.precision_plugin.pre_backward(closure_loss, module))
        with self._diagnosis.inside("backward", self._trainer()):
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            runner.after_backward()
        self._guard.saw_backward()
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if not self._module().automatic_optimization:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._live_runner().after_optimizer_step()
            return result
        if self._meshes is None or isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with torch.enable_grad():
            result = closure()
        if self._guard.window_is_empty():
            return result
        with self._diagnosis.inside("the optimizer's step", self._trainer()):
            return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._live_runner().accumulating():
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(UserStep("validation_step", args, kwargs, self.precision_plugin.val_step_context))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(UserStep("test_step", args, kwargs, self.precision_plugin.test_step_context))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(UserStep("predict_step", args, kwargs, self.precision_plugin.predict_step_context))

    def _evaluate(self, step: UserStep) -> Any:
        with self._diagnosis.inside("evaluation", self._trainer()), torch.inference_mode(False), torch.no_grad():
            output = self._run_evaluation(step, silent=False)
            joins = self._turns.left_to_join()
            if joins and self._logs is not None:
                with self._logs.silent(), kept_metrics(self._module()):
                    for _ in range(joins):
                        self._run_evaluation(step, silent=True)
        return output

    def _run_evaluation(self, step: UserStep, *, silent: bool) -> Any:
        if self._pipelining is not None:
            return self._pipelining.evaluate(step, self.root_device, silent=silent)
        module = self._module()
        with step.context():
            return self._live_runner().forward(lambda: getattr(module, step.entry)(*step.args, **step.kwargs))

    def _agree_on(self, output: Any, noted: list[Logged], failed: Callable[[], None] | None = None) -> Any:
        """Returns the step's output once all ranks know what all of them got, and logs what they logged.

        Args:
            output: of the user's step.
            noted: what it logged.
            failed: raises on all ranks what failed on a stage of a pipeline; called by all if it did on any.
        """
        assert self._meshes is not None and self._logs is not None
        automatic = self._module().automatic_optimization
        digest = names_digest(noted)
        loss = output.get("loss") if isinstance(output, dict) else output
        missing = automatic and output is None
        nonfinite = (
            self._on_nonfinite != "propagate"
            and isinstance(loss, Tensor)
            and not bool(torch.isfinite(loss.detach()).all())
        )
        terminated = self._termination is not None and self._termination.pending
        any_missing, any_nonfinite, any_terminated, highest, lowest = maxima(
            [missing, nonfinite, terminated, digest, -digest], self._meshes
        )
        if any_missing and failed is not None:
            failed()
        if any_terminated and self._termination is not None:
            self._termination.agree()
        self._logs.replay(noted, self._meshes, self.root_device, same_names=highest == -lowest)
        if any_nonfinite and self._on_nonfinite == "raise":
            ranks = [r for r, bad in enumerate(gather_objects(nonfinite, self._meshes)) if bad]
            raise FloatingPointError(
                f"the loss is not finite on rank(s) {ranks}; the strategy's on_nonfinite_loss='raise'"
            )
        self._guard.decide(skip=bool(any_missing or any_nonfinite))
        if output is None and automatic:
            # Lightning refuses None on several ranks, for it cannot know that they agreed.
            return torch.full((), float("nan"), device=self.root_device, requires_grad=True)
        return output

    # ---- between steps -------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self) -> None:
        self._before_evaluation(lightning_api.running_evaluation(self._trainer()))

    @override
    def on_test_start(self) -> None:
        self._before_evaluation(lightning_api.running_evaluation(self._trainer()))

    @override
    def on_predict_start(self) -> None:
        self._before_evaluation(self._trainer().predict_loop)

    @override
    def on_validation_end(self) -> None:
        self._live_runner().free_gathered()

    @override
    def on_test_end(self) -> None:
        self._live_runner().free_gathered()

    @override
    def on_predict_end(self) -> None:
        self._live_runner().free_gathered()
        loop = self._trainer().predict_loop
        if not (self._gather_predictions and self._meshes is not None and loop.return_predictions):
            return
        predictions = loop.predictions
        per_loader = [predictions] if loop.num_dataloaders == 1 else predictions
        for outputs, indices in zip(per_loader, lightning_api.predicted_indices(self._trainer()), strict=True):
            outputs[:] = gather_in_order(outputs, indices[: len(outputs)], self._meshes)

    def _before_evaluation(self, loop: Any) -> None:
        assert self._parallel_model is not None
        self._live_runner().free_gathered()
        average_statistics_(self._parallel_model)
        self._turns.start(lightning_api.evaluation_steps(loop), self._meshes if self._kind() == "shard" else None)

    def _sync_epoch_metrics(self) -> None:
        assert self._meshes is not None
        if self._pipelining is not None:
            self._pipelining.sync_metrics()
        sync_epoch_metrics(self._trainer(), self._meshes, self.root_device)

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

    def _live_runner(self) -> StepRunner:
        assert self._runner is not None
        return self._runner

    def _kind(self) -> str:
        return "none" if self._parallel_model is None else self._parallel_model.kind
