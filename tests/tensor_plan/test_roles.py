"""Roles of every kind of linear layer, each sharded region proved by numbers (see ``judge.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.plan import make_tensor_plan
from lightning_pardist.specs.tensor_roles import TensorRoles
from tests.tensor_plan import models
from tests.tensor_plan.judge import changes, output_of


def proved(module: nn.Module, *batch: Any, size: int = 2) -> TensorRoles:
    """Returns the derived roles after the proof that every region stands."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    roles = derive_roles(module.train(), batch, entry="forward")
    module.eval()
    moved = changes(module, roles, lambda: output_of(module(*batch)), size=size)
    assert all(change < 1e-5 for change in moved.values()), moved
    assert len(moved) == len(roles.regions)
    return roles


def words(roles: TensorRoles) -> dict[str, str]:
    return {weight.name: weight.role for weight in roles.weights}


def parts(roles: TensorRoles, name: str) -> tuple[int, ...]:
    return next(weight.parts for weight in roles.weights if weight.name == name)


def reason(roles: TensorRoles, name: str) -> str:
    return next(weight.reason for weight in roles.weights if weight.name == name)


@pytest.mark.parametrize("attend", [models.causal, models.eager])
@pytest.mark.parametrize("how", ["split", "chunk", "view", "unflatten", "slice", "interleaved"])
def test_gpt_with_fused_qkv(how: Any, attend: Any) -> None:
    roles = proved(models.GPT([models.Block(models.FusedAttention(how, attend)) for _ in range(2)]), models.ids())
    fused = "column" if how == "interleaved" else "fused_column"
    assert words(roles) == {
        "tokens": "vocab", "positions": "replicate",
        **{f"blocks.{i}.{name}": role for i in range(2) for name, role in (
            ("attention.qkv", fused), ("attention.out", "row"), ("mlp.up", "column"), ("mlp.down", "row"))},
    }  # fmt: skip
    assert parts(roles, "blocks.1.attention.qkv") == ((72,) if how == "interleaved" else (24, 24, 24))
    attention, mlp = roles.regions[:2]
    assert (attention.units, attention.query_heads, attention.key_value_heads) == (4, 4, 4)
    assert (mlp.units, mlp.query_heads) == (96, None)
    assert [p.name for p in mlp.parameters] == [f"blocks.0.mlp.{n}" for n in ("up.weight", "up.bias", "down.weight")]
    assert roles.unknown_functions == ()


def test_a_head_of_its_own() -> None:
    roles = proved(models.GPT([models.Block(models.FusedAttention("split"))], tied=False), models.ids())
    assert (words(roles)["tokens"], words(roles)["head"]) == ("vocab", "vocab")


@pytest.mark.parametrize("fused", [False, True])
def test_grouped_queries(fused: bool) -> None:
    roles = proved(nn.Sequential(models.Block(models.GroupedAttention(fused=fused))), models.hidden())
    if fused:
        assert words(roles)["0.attention.qkv"] == "fused_column"
        assert parts(roles, "0.attention.qkv") == (24, 12, 12)
    else:
        assert [words(roles)[f"0.attention.{n}"] for n in "qkv"] == ["column"] * 3
    region = roles.regions[0]
    assert (region.units, region.query_heads, region.key_value_heads) == (2, 4, 2)


def test_one_key_value_head_is_whole_and_the_queries_are_sharded() -> None:
    roles = proved(nn.Sequential(models.Block(models.GroupedAttention(groups=1))), models.hidden())
    assert [words(roles)[f"0.attention.{n}"] for n in ("q", "k", "v", "out")] == [
        "column",
        "replicate",
        "replicate",
        "row",
    ]


def test_a_norm_over_the_head_dim_leaves_the_region_alone() -> None:
    roles = proved(nn.Sequential(models.Block(models.GroupedAttention(norm="head"))), models.hidden())
    assert [words(roles)[f"0.attention.{n}"] for n in ("q", "k", "v", "out")] == ["column"] * 3 + ["row"]
    assert not any("norm" in parameter.name for region in roles.regions for parameter in region.parameters)


def test_a_norm_over_all_heads_keeps_the_attention_whole() -> None:
    roles = proved(nn.Sequential(models.Block(models.GroupedAttention(norm="all"))), models.hidden())
    assert [words(roles)[f"0.attention.{n}"] for n in ("q", "k", "v", "out")] == ["replicate"] * 4
    assert "rms_norm normalises over it" in reason(roles, "0.attention.q")
    assert words(roles)["0.mlp.up"] == "column"


def test_low_rank_projections_with_a_norm_between_them() -> None:
    roles = proved(nn.Sequential(models.Block(models.LatentAttention())), models.hidden())
    found = {name.removeprefix("0.attention."): role for name, role in words(roles).items()}
    assert [found[n] for n in ("q_a", "q_b", "kv_a", "kv_b", "out")] == [
        "replicate",
        "column",
        "replicate",
        "column",
        "row",
    ]
    assert roles.regions[0].query_heads == 4


def test_low_rank_without_a_norm_closes_at_once() -> None:
    module = nn.Sequential(nn.Linear(24, 6), nn.Linear(6, 24))
    assert list(words(proved(module, models.hidden())).values()) == ["column", "row"]


class Score(nn.Module):
    """A vector takes the features that a layer made, as the scores of additive attention are made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.vector = nn.Linear(24, 10), nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.vector


def test_a_vector_does_not_close_a_region() -> None:
    roles = derive_roles(Score(), models.hidden(), entry="forward")
    assert words(roles) == {"up": "replicate"}
    assert "summed over outside a linear layer" in reason(roles, "up")


def test_fused_gate() -> None:
    block = models.Block(models.FusedAttention("split"), models.GatedMLP())
    roles = proved(nn.Sequential(block), models.hidden())
    assert words(roles)["0.mlp.gate_up"] == "fused_column"
    assert parts(roles, "0.mlp.gate_up") == (40, 40)


class InterleavedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(24, 80), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(x)
        return self.down(y[..., ::2].sigmoid() * y[..., 1::2])


def test_interleaved_gate_is_an_ordinary_column() -> None:
    roles = proved(InterleavedGate(), models.hidden())
    assert words(roles) == {"gate_up": "column", "down": "row"}
    assert roles.regions[0].units == 40


def test_functional_weights() -> None:
    roles = proved(models.Functional(), models.hidden())
    assert words(roles) == {"w_in": "column", "w_out": "row", "v_in": "column", "v_out": "row"}
    assert [weight.dim for weight in roles.weights] == [0, 1, 0, 0]


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 60, batch_first=True, norm_first=norm_first, dropout=0.0)
    roles = proved(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), models.hidden())
    layer_0 = {name.removeprefix("layers.0."): role for name, role in words(roles).items() if "layers.0" in name}
    assert layer_0 == {
        "self_attn.in_proj_weight": "fused_column", "self_attn.out_proj": "row", "linear1": "column", "linear2": "row"
    }  # fmt: skip
    assert parts(roles, "layers.1.self_attn.in_proj_weight") == (24, 24, 24)
    assert (roles.regions[0].query_heads, roles.regions[0].units) == (4, 4)


def test_transformer_decoder_crosses_to_the_encoder() -> None:
    module = nn.Transformer(24, 4, 1, 1, 60, dropout=0.0, batch_first=True)
    roles = proved(module, models.hidden(), models.hidden().flip(0))
    assert words(roles)["decoder.layers.0.multihead_attn.in_proj_weight"] == "fused_column"
    assert len(roles.regions) == 5


class AveragedWeights(nn.Module):
    """Uses the attention weights, which are averaged over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(24, 4, batch_first=True), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x)
        return self.out(y) * weights.mean()


def test_attention_weights_in_use_keep_the_heads_together() -> None:
    roles = proved(AveragedWeights(), models.hidden())
    assert words(roles) == {"attention.in_proj_weight": "replicate", "attention.out_proj": "column", "out": "row"}
    assert "averaged" in reason(roles, "attention.in_proj_weight")


def test_vit_with_reshape() -> None:
    torch.manual_seed(1)
    blocks = [models.Block(models.FusedAttention("view", lambda q, k, v: F.scaled_dot_product_attention(q, k, v)))]
    roles = proved(models.ViT(blocks), torch.randn(2, 3, 8, 8))
    assert words(roles)["blocks.0.attention.qkv"] == "fused_column"
    assert words(roles)["head"] == "replicate"


def test_mlp_tower_pairs_its_layers_and_leaves_the_odd_one() -> None:
    layers = [
        nn.Linear(24, 32),
        nn.ReLU(),
        nn.Linear(32, 40),
        nn.ReLU(),
        nn.Linear(40, 48),
        nn.GELU(),
        nn.Linear(48, 16),
    ]
    assert list(words(proved(nn.Sequential(*layers), models.hidden())).values()) == ["column", "row"] * 2
    assert list(words(proved(nn.Sequential(*layers[:5]), models.hidden())).values()) == ["column", "row", "replicate"]


def test_a_norm_inside_a_pair_moves_the_region() -> None:
    tower = nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 24))
    assert list(words(proved(tower, models.hidden())).values()) == ["replicate", "column", "row"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


class LateNorm(nn.Module):
    """What the first layer makes is summed over only after the second layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(24, 32), nn.Linear(32, 40), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.three(self.two(y).relu()) * y.softmax(-1).amax(-1, keepdim=True)


class Counted(nn.Module):
    """Counts features by a mask, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y) * (y > 0).sum(-1, keepdim=True)


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (torch.cat([z[:, :, :0], z], dim=2) for z in (k, v))
    return models.causal(q, k, v)


def test_an_empty_cache_in_front_of_keys_and_values() -> None:
    roles = proved(nn.Sequential(models.Block(models.FusedAttention("chunk", cached))), models.hidden())
    assert words(roles)["0.attention.qkv"] == "fused_column"


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    slopes = 2.0 ** -torch.arange(1, models.HEADS + 1)
    return (q @ k.mT / 3 + slopes[:, None, None] * distance).softmax(-1) @ v


def test_a_constant_per_head_leaves_the_region_alone() -> None:
    roles = proved(nn.Sequential(models.Block(models.FusedAttention("chunk", alibi))), models.hidden())
    assert words(roles)["0.attention.qkv"] == "fused_column"


class GLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 64), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x)))


def test_a_count_over_features_keeps_them_together() -> None:
    assert set(words(proved(Counted(), models.hidden())).values()) == {"replicate"}


def test_glu_is_a_fused_gate() -> None:
    roles = proved(GLU(), models.hidden())
    assert words(roles) == {"up": "fused_column", "down": "row"}
    assert parts(roles, "up") == (32, 32)


def test_what_is_added_to_the_stream_is_whole() -> None:
    assert set(words(proved(Residual(), models.hidden())).values()) == {"replicate"}


def test_a_later_use_counts_too() -> None:
    assert words(proved(LateNorm(), models.hidden())) == {"one": "replicate", "two": "column", "three": "row"}


class Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class WithUnseen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y + Unseen.apply(y))


def test_what_cannot_be_seen_is_not_sharded() -> None:
    roles = proved(WithUnseen(), models.hidden())
    assert set(words(roles).values()) == {"replicate"}


def test_checkpointed_blocks_have_the_same_roles() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(models.MLP):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)

    assert list(words(proved(Checkpointed(), models.hidden())).values()) == ["column", "row"]
    assert list(words(derive_roles(Checkpointed(), models.hidden(), entry="forward")).values()) == ["column", "row"]


def test_a_run_that_cannot_finish_says_where() -> None:
    class Branch(models.MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(ValueError, match=r"must run to its end\.\n  Got: .*\n  From: Branch\.forward, at .*test_roles"):
        derive_roles(Branch(), models.hidden(), entry="forward")


class Sorting(nn.Module):
    """A function that no rule knows, between two layers that could be shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(models.WIDTH, 8), nn.Linear(8, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.renorm(self.up(x), 2, 0, 1.0))


def test_a_function_without_a_rule_is_told_with_its_module_and_what_to_do() -> None:
    module = nn.Sequential(Sorting(), nn.LayerNorm(models.WIDTH), models.MLP())
    plan = make_tensor_plan(derive_roles(module, models.hidden(), entry="forward"), size=2)
    assert {name: plan.role_of(name) for name in ("0.up", "0.down", "2.up", "2.down")} == {
        "0.up": "replicate", "0.down": "replicate", "2.up": "column", "2.down": "row"
    }  # fmt: skip
    assert plan.notes == (
        "renorm in 0 has no rule for shares, so what it meets is whole: leave it so, write it with functions of torch "
        "that have one, or name the layers around it in TensorOptions(plan=...) and let verify='full' try them",
    )
