"""The models of the zoo: how each is built small, with random weights and without dropout, and one batch for it.

A case is called by name, ``family/name``; building it twice gives the same weights.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

ROWS, STEPS, LENGTH, VOCABULARY, CLASSES, PIXELS = 4, 2, 16, 128, 10, 64
"""Rows of a global batch, and so on. Images of 64 pixels are enough for every stride of the vision models."""
FAMILIES = ("transformers", "timm", "torchvision", "user")


@dataclass
class Case:
    """A module ready to train, unchanged, and its data."""

    module: L.LightningModule
    rows: Dataset[Any]
    attempt: int = 0
    """Which way of making a config small worked, so that the next process need not search."""
    collate: Callable[[Any], Any] | None = None


class Wrapped(L.LightningModule):
    """The smallest LightningModule around somebody's module."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Rows(Dataset[Any]):
    """Rows of a batch of tensors, by key or by place."""

    def __init__(self, columns: Mapping[str, Tensor] | tuple[Tensor, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        first = next(iter(self.columns.values())) if isinstance(self.columns, Mapping) else self.columns[0]
        return len(first)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, Mapping):
            return {key: column[index] for key, column in self.columns.items()}
        return tuple(column[index] for column in self.columns)


def build(name: str, attempt: int | None = None) -> Case:
    """Returns the case of that name; the first build of a model of transformers finds how it runs small."""
    family, _, short = name.partition("/")
    torch.manual_seed(0)
    if family == "transformers":
        return _language(short, attempt)
    if family == "timm":
        return _vision(_timm(short))
    if family == "torchvision":
        return _vision(_torchvision(short))
    return _of_users(short)


# ---- transformers ----------------------------------------------------------------------------------------------------


def _language(model_type: str, attempt: int | None) -> Case:
    from benchmarks.support.small_models import ATTEMPTS, running_attempt, small_model

    tokens = torch.randint(3, VOCABULARY, (ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if attempt is None:
        attempt, _ = running_attempt(model_type, {key: rows[:2] for key, rows in batch.items()}, _without_dropout)
    net = small_model(model_type, ATTEMPTS[attempt], _without_dropout)
    return Case(Wrapped(_quiet(net), _language_loss), Rows(batch), attempt)


def _language_loss(net: nn.Module, batch: Any) -> Tensor:
    return net(**batch).loss


def _without_dropout(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in list(vars(part).items()):
            if ("drop" in key or "jitter" in key) and isinstance(value, float):
                with contextlib.suppress(Exception):
                    setattr(part, key, 0.0)


# ---- vision ----------------------------------------------------------------------------------------------------------


def _vision(net: nn.Module) -> Case:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, CLASSES, (ROWS * STEPS,), generator=generator)
    images = torch.randn(ROWS * STEPS, 3, PIXELS, PIXELS, generator=generator) + labels.view(-1, 1, 1, 1) / 4
    return Case(Wrapped(_quiet(net), _vision_loss), Rows((images, labels)))


def _vision_loss(net: nn.Module, batch: Any) -> Tensor:
    out = net(batch[0])
    if not isinstance(out, Tensor):  # googlenet and inception: the main classifier and helpers
        main, *helpers = [logits for logits in out if logits is not None]
        return F.cross_entropy(main, batch[1]) + 0.3 * sum(F.cross_entropy(each, batch[1]) for each in helpers)
    return F.cross_entropy(out, batch[1])


_SMALL_VIT = {"embed_dim": 64, "depth": 4, "num_heads": 4}
_ANY_SIZE = """
resnet18 resnet50 resnext50_32x4d seresnet18 densenet121 efficientnet_b0 mobilenetv2_100 mobilenetv3_small_050
mobilenetv4_conv_small mnasnet_100 regnetx_002 regnety_002 convnext_atto convnextv2_atto poolformer_s12 eca_nfnet_l0
rexnet_100 res2net50_26w_4s hrnet_w18_small dla34 dpn68 cspresnet50 darknet53 edgenext_xx_small efficientvit_b0
fastvit_t8 repvgg_a0 mobilevit_xxs mobileone_s0 ghostnet_050 convmixer_768_32 inception_next_tiny focalnet_tiny_srf
vovnet39a lcnet_050 starnet_s1 resnest14d pvt_v2_b0 davit_tiny tiny_vit_5m_224
"""
_OWN_SIZE = """
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 xcit_nano_12_p16_224 coat_lite_mini levit_128s maxvit_rmlp_pico_rw_256
coatnet_pico_rw_224 resmlp_12_224 gmlp_ti16_224 pit_ti_224 twins_pcpvt_small visformer_tiny volo_d1_224 hiera_tiny_224
convit_tiny tnt_s_patch16_224 sequencer2d_s mixer_s16_224
"""
_VITS = """
vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 vit_base_patch16_clip_224
vit_base_patch16_siglip_224 cait_xxs24_224 samvit_base_patch16
"""
TIMM: dict[str, dict[str, Any]] = {
    **{name: {} for name in _ANY_SIZE.split()},
    **{name: {"img_size": PIXELS} for name in _OWN_SIZE.split()},
    **{name: {"img_size": PIXELS, **_SMALL_VIT} for name in _VITS.split()},
    **{name: {"img_size": 56, **_SMALL_VIT} for name in ("vit_small_patch14_dinov2", "eva02_base_patch14_224")},
    "efficientformer_l1": {},
}
_TORCHVISION = """
alexnet squeezenet1_1 resnet18 resnet50 wide_resnet50_2 resnext50_32x4d densenet121 googlenet mobilenet_v2
mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 efficientnet_b0 regnet_y_400mf regnet_x_400mf convnext_tiny swin_t
swin_v2_t vit_b_16 maxvit_t
"""


def _timm(name: str) -> nn.Module:
    import_torchvision()
    import timm

    options = {"num_classes": CLASSES, "drop_rate": 0.0, **TIMM[name]}
    net = timm.create_model(name, **options)
    size = 224 if name == "efficientformer_l1" else options.get("img_size", PIXELS)
    return net if size == PIXELS else _Resized(net, size)


class _Resized(nn.Module):
    """For patches that 64 pixels do not divide into, and for networks of one size."""

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, images: Tensor) -> Tensor:
        return self.net(F.interpolate(images, (self.size, self.size)))


def _torchvision(name: str) -> nn.Module:
    torchvision = import_torchvision()
    options: dict[str, Any] = {"num_classes": CLASSES}
    if name == "googlenet":
        options |= {"aux_logits": True, "init_weights": True}
    if name == "vit_b_16":
        return torchvision.models.VisionTransformer(
            image_size=PIXELS, patch_size=16, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=CLASSES
        )
    if name == "maxvit_t":
        return torchvision.models.MaxVit(
            (PIXELS, PIXELS), 32, 2, [32, 64], [2, 2], 16, stochastic_depth_prob=0.0, num_classes=CLASSES
        )
    return getattr(torchvision.models, name)(**options)


def import_torchvision() -> Any:
    """Returns torchvision, also beside a torch built without CUDA.

    The wheel of the registry is built for CUDA: its own operators (boxes) do not load beside a torch for CPUs, and its
    import then stops for want of their names. No classifier uses them. Lightning's own imports would stop there, too,
    so such a torchvision lies in a folder of its own, which is looked at only now: ``ZOO_SITE``.
    """
    site = os.environ.get("ZOO_SITE")
    if site and site not in sys.path:
        sys.path.append(site)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        global _operators
        _operators = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")


_operators: Any = None


def _quiet(net: nn.Module) -> nn.Module:
    """Turns off what is random in training mode."""
    for module in net.modules():
        kind = type(module).__name__.lower()
        for attribute in ("p", "drop_prob", "drop_rate"):
            is_dropout = "drop" in kind or "stochasticdepth" in kind
            if is_dropout and isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return net.train()


# ---- as users write them ---------------------------------------------------------------------------------------------


def _of_users(name: str) -> Case:
    kind, _, short = name.partition(":")
    if kind == "tensor":
        from tests.tensor_parallel import models

        return Case(models.MODELS[short](), models.dataset(ROWS * STEPS))
    from tests.pipeline import modules as pipeline_modules
    from tests.support import modules

    module: Any = {**modules.MODULES, **pipeline_modules.MODULES}[short]()
    return Case(module, module.dataset(ROWS * STEPS, seed=5), collate=getattr(module, "collate", None))


_TENSOR = ("fused split", "fused unflatten", "interleaved", "grouped fused", "latent", "encoder", "encoder-3-heads",
           "tower", "vit")  # fmt: skip
_PLAIN = """
gpt recomputed_gpt skip_gpt vit encoder llama seq2seq convnet groupnorm recurrent autoencoder weight_penalty
unused_parameters shared_weights bare_parameters scalar_parameters many_states routed_experts chooser dense tables
in_place idle
"""
USER = (*(f"tensor:{name}" for name in _TENSOR), *(f"plain:{name}" for name in _PLAIN.split()))


def names() -> dict[str, list[str]]:
    """Returns the names of all cases by family; a family that is not installed has none."""
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    with contextlib.suppress(ImportError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        found["transformers"] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    places = [*sys.path, os.environ.get("ZOO_SITE", "")]  # looked for, not imported: the workers do that, and later
    if PathFinder.find_spec("torchvision", places):
        found["torchvision"] = sorted(_TORCHVISION.split())
        if PathFinder.find_spec("timm", places):
            found["timm"] = sorted(TIMM)
    found["user"] = list(USER)
    return {family: [f"{family}/{name}" for name in members] for family, members in found.items()}
