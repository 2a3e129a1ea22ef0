"""Unchanged models of transformers, proved by numbers; benchmarks/tensor_plan.py does all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pardist.describe.linear_roles import derive_roles
from lightning_pardist.plan.tensor_parallel import make_tensor_plan
from lightning_pardist.specs.tensor_roles import TensorRoles
from tests.support.marks import transformers_or_skip
from tests.tensor_plan.judge import changes, output_of

transformers = transformers_or_skip()
pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 65, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 65, "n_positions": 32, "resid_pdrop": 0.0}
_MLP = {"mlp.gate_proj": "column", "mlp.up_proj": "column", "mlp.down_proj": "row"}
_WHOLE = {f"self_attn.{name}_proj": "replicate" for name in "qkvo"}
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "llama": (_LLAMA, "model.layers.*.", {
        **{f"self_attn.{name}_proj": "column" for name in "qkv"}, "self_attn.o_proj": "row", **_MLP}),
    "phi3": (_LLAMA, "model.layers.*.", {"self_attn.qkv_proj": "fused_column", "self_attn.o_proj": "row",
             "mlp.gate_up_proj": "fused_column", "mlp.down_proj": "row"}),
    "gpt2": (_GPT2, "transformer.h.*.", {"attn.c_attn": "fused_column", "attn.c_proj": "row",
             "mlp.c_fc": "column", "mlp.c_proj": "row"}),
    "olmo2": (_LLAMA, "model.layers.*.", {**_WHOLE, **_MLP}),
}  # fmt: skip


def roles_of(model: Any, **batch: torch.Tensor) -> TensorRoles:
    roles = derive_roles(model.train(), batch, entry="forward")
    model.eval()
    first_block = [region.index for region in roles.regions[:2]]
    moved = changes(model, roles, lambda: output_of(model(**batch, use_cache=False).logits), only=first_block)
    assert all(change < 1e-5 for change in moved.values()), moved
    return roles


def tokens() -> torch.Tensor:
    return torch.randint(3, 65, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", MODELS)
def test_causal_language_models(model_type: str) -> None:
    settings, prefix, expected = MODELS[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    roles = roles_of(model, input_ids=tokens(), labels=tokens())
    plan = make_tensor_plan(roles, size=2)
    assert {entry.pattern: entry.role for entry in plan.entries if entry.pattern.startswith(prefix)} == {
        prefix + name: role for name, role in expected.items()
    }
    tables = {weight.name: weight.role for weight in roles.weights if weight.shape[0] == 65}
    assert tables and set(tables.values()) == {"vocab"}
    if model_type == "phi3":
        assert plan.entries[1].parts == (32, 16, 16)
    if model_type in ("llama", "phi3"):
        assert (roles.regions[0].query_heads, roles.regions[0].key_value_heads) == (4, 2)


def test_t5_shards_its_position_bias_with_the_heads() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=6, d_ff=40, num_layers=2, num_heads=4, vocab_size=65, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    roles = roles_of(model, input_ids=tokens(), labels=tokens())
    plan = make_tensor_plan(roles, size=2)
    found = {entry.pattern: entry.role for entry in plan.entries}
    attention = [f"{side}.block.*.layer.*.{kind}" for side, kind in (
        ("encoder", "SelfAttention"), ("decoder", "SelfAttention"), ("decoder", "EncDecAttention"))]  # fmt: skip
    for name in attention:
        assert [found[f"{name}.{part}"] for part in "qkvo"] == ["column"] * 3 + ["row"]
    assert found["encoder.block.*.layer.*.DenseReluDense.wi"] == "column"
    bias = next(
        weight for weight in roles.weights if "encoder" in weight.name and "relative_attention_bias" in weight.name
    )
    assert (bias.role, bias.dim) == ("column", 1)
    assert {w.role for w in roles.weights if w.shape[0] == 65} == {"vocab"}
