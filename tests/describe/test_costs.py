"""FLOPs, parameter bytes and saved activation bytes, against a hand count and against the real run."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pardist.describe import profile_model
from tests.describe.judge import Real, measure
from tests.describe.models import (
    GAN,
    GPT,
    Block,
    Experts,
    Names,
    RecurrentNet,
    StepModule,
    VisionTransformer,
    conv_net,
    gpt_batch,
)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.use_reentrant = nn.ModuleList([Block(32) for _ in range(3)]), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class GradientPenalty(nn.Module):
    """The gradient of the network is part of the loss: a backward pass that is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return gradient


def encoder_layers(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


STEPS: dict[str, tuple[Any, Any]] = {
    "gpt": (GPT, gpt_batch),
    "encoder": (lambda: StepModule(encoder_layers()), lambda: torch.randn(2, 8, 32)),
    "encoder_no_dropout": (lambda: StepModule(encoder_layers(dropout=0.0)), lambda: torch.randn(2, 8, 32)),
    "vit": (lambda: StepModule(VisionTransformer()), lambda: torch.randn(2, 3, 16, 16)),
    "conv": (lambda: StepModule(conv_net()), lambda: torch.randn(2, 3, 16, 16)),
    "experts": (
        lambda: StepModule(Names(blocks=nn.ModuleList([Experts(32, 4) for _ in range(3)]))),
        lambda: torch.randn(2, 8, 32),
    ),
    "lstm": (lambda: StepModule(RecurrentNet()), lambda: torch.randn(2, 5, 16)),
    "checkpoint": (lambda: StepModule(Checkpointed(False)), lambda: torch.randn(2, 8, 32)),
    "checkpoint_reentrant": (lambda: StepModule(Checkpointed(True)), lambda: torch.randn(2, 8, 32, requires_grad=True)),
    "gradient_penalty": (lambda: StepModule(GradientPenalty()), lambda: torch.randn(4, 8)),
}


def real_step(module: L.LightningModule, batch: Any) -> Real:
    module = copy.deepcopy(module)
    module.log = lambda *args, **kwargs: None
    return measure(module, lambda: module.training_step(batch, 0))


@pytest.mark.parametrize("name", STEPS)
def test_costs_equal_the_real_step(name: str) -> None:
    make, make_batch = STEPS[name]
    torch.manual_seed(0)
    module, batch = make(), make_batch()
    profile = profile_model(module, batch)
    real = real_step(module, batch)
    assert profile.fallback_reason is None
    assert profile.flops_forward + profile.flops_backward == real.forward + real.backward
    if name != "gradient_penalty":  # the judge counts its inner backward pass with the forward pass
        assert profile.flops_forward == real.forward
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)
    assert sum(parameter.nbytes for parameter in profile.parameters) == sum(p.nbytes for p in module.parameters())
    assert profile.buffer_bytes == sum(buffer.nbytes for buffer in module.buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_costs_under_autocast_equal_the_real_step(dtype: torch.dtype) -> None:
    module, batch = GPT(), gpt_batch()
    module.log = lambda *args, **kwargs: None
    profile = profile_model(module, batch, autocast_dtype=dtype)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return module.training_step(batch, 0)

    real = measure(module, step)
    assert (profile.flops_forward, profile.flops_backward) == (real.forward, real.backward)
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)
    assert profile.stacks[0].blocks[1].inputs[0].dtype == torch.float32
    assert profile.saved_activation_bytes < profile_model(module, batch).saved_activation_bytes


def test_flops_equal_the_hand_count() -> None:
    rows, length, width, vocabulary = 2, 16, 32, 96
    profile = profile_model(GPT(vocabulary, width, blocks=3, length=length), gpt_batch(vocabulary, rows, length))
    tokens = rows * length
    linears = 2 * tokens * 12 * width * width  # qkv 3, projection 1, feed-forward 4 + 4
    attention = 2 * 2 * rows * length * length * width
    head = 2 * tokens * width * vocabulary
    blocks = profile.stacks[0].blocks
    assert [block.cost.flops_forward for block in blocks] == [linears + attention] * 3
    # Backward: twice the linears; attention recomputes the scores, so five products for two.
    assert [block.cost.flops_backward for block in blocks] == [2 * linears + attention * 5 // 2] * 3
    assert (profile.suffix.flops_forward, profile.suffix.flops_backward) == (head, 2 * head)
    assert (profile.prefix.flops_forward, profile.between.flops_forward) == (0, 0)


def test_a_recurrent_layer_counts_its_products() -> None:
    profile = profile_model(StepModule(RecurrentNet()), torch.randn(2, 5, 16))
    cells = 2 * 2 * 5 * 4 * 24 * ((16 + 24) + (24 + 24))  # two layers of four gates
    assert profile.flops_forward == cells + 2 * 2 * 24 * 4
    assert profile.flops_backward == 2 * profile.flops_forward


def test_frozen_blocks_cost_no_backward() -> None:
    module = GPT()
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    for frozen in (module.wte, module.wpe, *module.blocks[:2]):
        frozen.requires_grad_(False)
    profile = profile_model(module, gpt_batch())
    first, second, third = profile.stacks[0].blocks
    assert (first.cost.flops_backward, second.cost.flops_backward) == (0, 0)
    assert first.cost.saved_activation_bytes == 0
    assert third.cost.flops_backward > 0
    real = real_step(module, gpt_batch())
    assert profile.flops_backward == real.backward


def test_recomputation_counts_for_the_block_that_is_recomputed() -> None:
    torch.manual_seed(0)
    blocks = profile_model(StepModule(Checkpointed(False)), torch.randn(2, 8, 32)).stacks[0].blocks
    plain = profile_model(StepModule(Names(blocks=nn.ModuleList([Block(32) for _ in range(3)]))), torch.randn(2, 8, 32))
    for block, other in zip(blocks, plain.stacks[0].blocks):
        assert block.calls == 1
        assert block.cost.flops_forward == other.cost.flops_forward
        # The last products of a block need not be computed again: nothing they save is wanted.
        again = block.cost.flops_backward - other.cost.flops_backward
        assert 0.5 * block.cost.flops_forward < again <= block.cost.flops_forward


def test_manual_optimization_costs_equal_the_real_step() -> None:
    torch.manual_seed(0)
    module, batch = GAN(), torch.randn(4, 16)
    profile = profile_model(module, batch)
    real = copy.deepcopy(module)
    optimizers, schedulers = real.configure_optimizers()
    real.optimizers, real.lr_schedulers = lambda: optimizers, lambda: schedulers
    real.trainer = type("Trainer", (), {"optimizers": optimizers})()
    real.manual_backward = lambda loss: loss.backward()
    real.clip_gradients = real.log_dict = lambda *args, **kwargs: None
    counted = measure(real, lambda: real.training_step(batch, 0))
    assert profile.fallback_reason is None
    assert profile.flops_forward + profile.flops_backward == counted.forward + counted.backward
    assert profile.flops_backward > 0
    assert profile.saved_activation_bytes == pytest.approx(counted.saved, rel=0.01)
