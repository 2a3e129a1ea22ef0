"""From Lightning's precision plugin to the dtypes of a plan; and clipping, which Lightning asks of the plugin.

| Trainer(precision=)  | stored     | gathered, computed  | gradients reduced | how                                  |
| -------------------- | ---------- | ------------------- | ----------------- | ------------------------------------ |
| 32-true, 64-true     | as built   | as stored           | as stored         |                                      |
| bf16-true, 16-true   | bf16, fp16 | as stored           | as stored         | the module is converted, inputs too  |
| bf16-mixed, sharded  | fp32       | bf16 (autocast too) | fp32              | fully_shard's mixed-precision policy |
| bf16-mixed, ZeRO-0   | fp32       | autocast            | fp32              | nothing is gathered                  |
| 16-mixed             | refused    |                     |                   | needs a loss scale all ranks agree on|
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.base.errors import message
from lightning_pardist.mesh import Meshes
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.clip import clip_by_norm, clip_by_value
from lightning_pardist.run.shard_step import ShardStep
from lightning_pardist.run.whole_scalars import WholeScalars
from lightning_pardist.specs.parallel_plan import PrecisionPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lightning.pytorch import LightningModule

_TModule = TypeVar("_TModule", bound=nn.Module)


class _MeshPrecision(Precision):
    """What our plugins add to Lightning's: clipping by a norm that all ranks share, and updates on plain shards."""

    meshes: Callable[[], Meshes | None]
    norm_type: float
    uncounted: Callable[[], Collection[int]]

    @cached_property
    def _scalars(self) -> WholeScalars:
        return WholeScalars()

    @override
    def optimizer_step(  # type: ignore[override]  # Lightning's own subclasses narrow it like this
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """As in Lightning (no plugin of ours scales the loss), with the update itself on shards."""
        with ShardStep(optimizer) as shards:

            def before_update() -> Any:
                # The step, hooks and clipping see DTensors; the optimizer reads its groups after its closure.
                with nullcontext() if self.meshes() is None else self._scalars:
                    result = self._wrap_closure(model, optimizer, closure)
                shards.show()
                return result

            return optimizer.step(closure=before_update, **kwargs)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips in place; the norm is one number over all shards, replicas and tied weights counted once."""
        if clip_val <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with self._scalars.paused():
            if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
                clip_by_value(parameters, float(clip_val))
            else:
                clip_by_norm(parameters, float(clip_val), self.norm_type, self.meshes(), uncounted=self.uncounted())


class _MeshFull(_MeshPrecision):
    pass


class _MeshDouble(_MeshPrecision, DoublePrecision):
    pass


class _MeshMixed(_MeshPrecision, MixedPrecision):  # type: ignore[misc]  # each narrows optimizer_step in its way
    pass


class _MeshHalf(_MeshPrecision, HalfPrecision):
    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Casts everything but metrics, which count in their own dtype."""
        _convert(module, self._desired_input_dtype)
        return module


def mesh_precision(
    plugin: Precision,
    meshes: Callable[[], Meshes | None],
    norm_type: float,
    uncounted: Callable[[], Collection[int]] = frozenset,
) -> Precision:
    """Returns the plugin of the same meaning whose clipping knows the mesh.

    Args:
        plugin: Lightning's.
        meshes: the live mesh, once there is one.
        norm_type: p of the norm that gradients are clipped by.
        uncounted: ids of parameters that count in the norm on another rank.

    Raises:
        MisconfigurationException: for 16-mixed, and for plugins whose effect on shards is unknown.
    """
    ours = _replacement(plugin)
    ours.meshes = meshes
    ours.norm_type = norm_type
    ours.uncounted = uncounted
    return ours


def precision_plan(plugin: Precision, *, sharded: bool) -> PrecisionPlan:
    """Returns the dtypes in which parameters are gathered and gradients reduced; see the table above."""
    name = str(plugin.precision)
    if name == "bf16-mixed" and sharded:
        return PrecisionPlan(name=name, gather_dtype="bfloat16", reduce_dtype="float32")
    return PrecisionPlan(name=name)


def _replacement(plugin: Precision) -> Any:
    if isinstance(plugin, _MeshPrecision):
        return plugin
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return _MeshMixed("bf16-mixed", plugin.device)
    if type(plugin) is HalfPrecision:
        return _MeshHalf(plugin.precision)
    if type(plugin) is DoublePrecision:
        return _MeshDouble()
    if type(plugin) is Precision:
        return _MeshFull()
    raise MisconfigurationException(
        message(
            "The strategy works with the precisions 32-true, 64-true, bf16-true, 16-true and bf16-mixed.",
            got=f"{type(plugin).__name__} ({plugin.precision})",
            source="Trainer(precision=...), Trainer(plugins=...) or the strategy's precision_plugin",
            change="use precision='bf16-mixed': it has the range of fp32 and needs no loss scale to agree on",
        )
    )


def _convert(module: nn.Module, dtype: Any) -> None:
    if isinstance(module, Metric):
        return
    for child in module.children():
        _convert(child, dtype)
    if any(isinstance(child, Metric) for child in module.modules()):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    else:
        module.to(dtype)


def check_norm_type(norm_type: object) -> float:
    """Returns the norm type if it is one.

    Raises:
        ValueError: if it is not positive.
    """
    if isinstance(norm_type, (int, float)) and norm_type > 0:
        return float(norm_type)
    raise ValueError(
        message(
            "gradient_clip_norm_type is the p of a p-norm: a positive number, or inf.",
            got=f"gradient_clip_norm_type={norm_type!r}",
            source="the strategy's arguments",
            change="use 2 (the default), 1 or float('inf')",
        )
    )


def counted_elsewhere(model: ParallelModel | None) -> frozenset[int]:
    """Returns the ids of the parameters whose gradients another pipeline stage counts."""
    if model is None or not model.tied_across_stages:
        return frozenset()
    return frozenset(id(p) for n, p in model.module.named_parameters() if n in model.tied_across_stages)
