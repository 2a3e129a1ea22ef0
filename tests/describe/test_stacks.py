"""Which modules are found to be blocks, and which phase uses each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pardist.describe import module_tree_profile, profile_model
from lightning_pardist.specs.model_profile import ModelProfile
from tests.describe.models import GPT, Block, Experts, Names, StepModule, VisionTransformer, conv_net, gpt_batch


def blocks(count: int = 3, width: int = 32) -> nn.ModuleList:
    return nn.ModuleList([Block(width) for _ in range(count)])


def found(profile: ModelProfile) -> dict[str, int]:
    return {stack.name: len(stack.blocks) for stack in profile.stacks}


def described(net: nn.Module, batch: Any = None) -> ModelProfile:
    profile = profile_model(net, torch.randn(2, 8, 32) if batch is None else batch, entry="forward")
    assert profile.fallback_reason is None
    return profile


class Stage(nn.Module):
    """A stage of a hierarchical vision transformer: blocks, then half the length at twice the width."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(count)))
        self.merge = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merge(self.blocks(x))[:, ::2]


class WideBlock(Block):
    pass


class ParallelHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class NormsApart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), nn.Identity()) for _ in range(3)])
        self.layers = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers):
            x = layer(norm(x))
        return x


class TwoTowers(nn.Module):
    """Encoder and decoder, and a projection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.encoder, self.bridge = nn.Linear(32, 32), blocks(2), nn.Linear(32, 32)
        self.decoder, self.outlet = blocks(3), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.encoder:
            x = block(x)
        x = self.bridge(x)
        for block in self.decoder:
            x = block(x)
        return self.outlet(x)


class CalledBackwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


class PrivateBlock(nn.Module):
    """A block with parameters of its own and no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(32)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x * self.scales[0]) @ self.weight * self.scales[1]


STACKS: dict[str, tuple[Any, dict[str, int]]] = {
    "module_list": (lambda: Names(h=blocks()), {"h": 3}),
    "sequential": (lambda: Names(h=nn.Sequential(*blocks())), {"h": 3}),
    "module_dict": (lambda: Names(h=nn.ModuleDict({str(i): block for i, block in enumerate(blocks())})), {"h": 3}),
    "nested": (lambda: Names(a=Names(b=Names(c=blocks()))), {"a.b.c": 3}),
    "one_sequential": (
        lambda: nn.Sequential(nn.Linear(32, 32), *blocks(), nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 4))),
        {"": 3},
    ),
    "experts": (lambda: Names(h=nn.ModuleList([Experts(32, 4) for _ in range(3)])), {"h": 3}),
    "experts_alone": (lambda: Experts(32, 4), {}),
    "parallel_heads": (ParallelHeads, {}),
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), {}),
    "two_classes": (lambda: Names(h=nn.ModuleList([Block(32), WideBlock(32), Block(32), WideBlock(32)])), {"h": 4}),
    "odd_last": (lambda: Names(h=nn.ModuleList([Block(32), Block(32), WideBlock(32)])), {"h": 3}),
    "norms_apart": (NormsApart, {"layers": 3}),
    "towers": (TwoTowers, {"encoder": 2, "decoder": 3}),
    "looped": (Looped, {"blocks": 2}),
    "private": (lambda: Names(h=nn.ModuleList([PrivateBlock() for _ in range(3)])), {"h": 3}),
    "stages": (
        lambda: Names(stages=nn.ModuleList([Stage(32, 2), Stage(64, 2), Stage(128, 2)])),
        {"stages.0.blocks": 2, "stages.1.blocks": 2, "stages.2.blocks": 2},
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name: str) -> None:
    make, expected = STACKS[name]
    profile = described(make())
    assert found(profile) == expected
    names = {parameter.name for parameter in profile.parameters}
    for block in profile.blocks():
        assert block.calls > 0
        assert block.parameter_names
        assert names.issuperset(block.parameter_names)


def test_a_conv_net_has_no_stack_and_all_costs_in_the_prefix() -> None:
    profile = described(conv_net(), torch.randn(2, 3, 16, 16))
    assert profile.stacks == ()
    assert profile.prefix.flops_forward == profile.flops_forward > 0
    assert {parameter.phases for parameter in profile.parameters} == {("prefix",)}


def test_blocks_come_in_call_order() -> None:
    (stack,) = described(CalledBackwards()).stacks
    assert [block.name for block in stack.blocks] == ["blocks.2", "blocks.1", "blocks.0"]
    assert [block.index for block in stack.blocks] == [0, 1, 2]


def test_blocks_called_in_a_loop_say_how_often() -> None:
    profile = described(Looped())
    assert [block.calls for block in profile.blocks()] == [3, 3]
    once = described(Names(h=blocks(2)))
    assert profile.flops_forward == 3 * once.flops_forward


def test_phases_and_ties() -> None:
    profile = profile_model(GPT(blocks=2), gpt_batch())
    by_name = {parameter.name: parameter for parameter in profile.parameters}
    assert by_name["wte.weight"].phases == ("prefix", "suffix")
    assert by_name["wte.weight"].aliases == ("head.weight",)
    assert "head.weight" not in by_name
    assert by_name["wpe.weight"].phases == ("prefix",)
    assert by_name["ln_f.bias"].phases == ("suffix",)
    assert all(by_name[name].phases == (block.name,) for block in profile.blocks() for name in block.parameter_names)
    assert profile.num_parameters == sum(p.numel() for p in GPT(blocks=2).parameters())
    assert (profile.batch_rows, profile.batch_tokens) == (2, 32)
    assert profile.called_modules is not None
    assert {"wte", "blocks.0", "blocks.0.attn.qkv", "head"} <= set(profile.called_modules)


def test_phases_between_two_stacks() -> None:
    profile = described(TwoTowers())
    phases = {parameter.name: parameter.phases for parameter in profile.parameters if "coder" not in parameter.name}
    assert {name.split(".")[0]: phase for name, phase in phases.items()} == {
        "inlet": ("prefix",),
        "bridge": ("between",),
        "outlet": ("suffix",),
    }
    assert profile.between.flops_forward == 2 * 2 * 8 * 32 * 32


def test_unused_and_frozen_parameters() -> None:
    net = Names(h=blocks(2))
    net.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    net.h[0].ln_1.weight.requires_grad_(False)
    profile = described(net)
    assert profile.unused_parameters == ("spare",)
    frozen = [parameter.name for parameter in profile.parameters if not parameter.requires_grad]
    assert frozen == ["h.0.ln_1.weight"]


class WithMask(nn.Module):
    """Positions from the batch, a mask from the prefix, a table from a buffer, a bias from a parameter of block 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([MaskedBlock(first=index == 0) for index in range(3)])
        self.register_buffer("table", torch.randn(8, 32))

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        x, bias = self.embed(tokens), None
        for block in self.blocks:
            x, bias = block(
                x, mask, extra={"lengths": lengths, "table": self.table}, bias=bias, weight=self.embed.weight
            )
        return x


class MaskedBlock(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.bias = nn.Parameter(torch.zeros(32)) if first else None

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, *, extra: Any, bias: torch.Tensor | None, weight: torch.Tensor
    ) -> Any:
        bias = self.bias * 2 if bias is None else bias
        return x + self.linear(x * mask[..., None] + extra["table"][: x.shape[1]] + bias), bias


def test_inputs_of_a_block_and_where_they_come_from() -> None:
    batch = (torch.randint(0, 16, (2, 8)), torch.tensor([8, 5]))
    profile = described(WithMask(), batch)
    first, second, third = profile.stacks[0].blocks
    origins = {spec.name: (spec.shape, spec.origin, spec.depends_on) for spec in third.inputs}
    assert origins == {
        "0": ((2, 8, 32), "blocks.1", ("prefix", "blocks.0", "blocks.1")),
        "1": ((2, 8), "prefix", ()),
        "extra.lengths": ((2,), "batch.1", ()),
        "extra.table": ((8, 32), "constant", ()),
        "bias": ((32,), "blocks.0", ("blocks.0",)),
        "weight": ((16, 32), "parameter:embed.weight", ()),
    }
    assert "bias" not in {spec.name for spec in first.inputs}
    assert [(spec.name, spec.origin) for spec in second.outputs] == [("0", "blocks.1"), ("1", "blocks.0")]
    assert next(spec for spec in third.inputs if spec.name == "1").dtype == torch.bool
    assert next(spec for spec in third.inputs if spec.name == "0").requires_grad


def test_the_module_tree_alone() -> None:
    profile = module_tree_profile(StepModule(VisionTransformer()))
    assert profile.source == "module_tree"
    assert profile.fallback_reason is not None
    assert "no batch" in profile.fallback_reason
    assert found(profile) == {"net.blocks": 3}
    assert profile.flops_forward == 0
    assert all(block.calls == 0 and block.inputs == () for block in profile.blocks())
    assert profile.unused_parameters == ()
    assert found(module_tree_profile(GPT())) == {"blocks": 3}
    assert found(module_tree_profile(Names(h=nn.ModuleList([Experts(32, 4) for _ in range(3)])))) == {"h": 3}
    assert module_tree_profile(conv_net(), "asked for").fallback_reason == "asked for"
