"""Unchanged models of transformers; benchmarks/describe.py does all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pardist.describe import profile_model
from tests.describe.judge import measure
from tests.support.marks import transformers_or_skip

transformers = transformers_or_skip()

_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": (_LLAMA, {"model.layers": 3}),
    "gpt2": ({"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 32}, {"transformer.h": 3}),
    "gemma2": ({**_LLAMA, "head_dim": 8}, {"model.layers": 3}),
    "mixtral": ({**_LLAMA, "num_local_experts": 4}, {"model.layers": 3}),
    "qwen3_moe": (
        {**_LLAMA, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"model.layers": 3},
    ),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "state_size": 4}, {"backbone.layers": 3}),
    "bloom": ({"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64}, {"transformer.h": 3}),
    "opt": (
        {**_LLAMA, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1},
        {"model.decoder.layers": 3},
    ),
    "bart": (
        {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "vocab_size": 64},
        {"model.decoder.layers": 3},
    ),
    "phi": (_LLAMA, {"model.layers": 3}),
}  # fmt: skip


def small(model_type: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type][0])
    return transformers.AutoModelForCausalLM.from_config(config).train()


def tokens(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, **more}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", MODELS)
def test_causal_language_models(model_type: str) -> None:
    model = small(model_type)
    profile = profile_model(model, tokens(), entry="forward")
    assert profile.fallback_reason is None
    assert {stack.name: len(stack.blocks) for stack in profile.stacks} == MODELS[model_type][1]
    real = measure(model, lambda: model(**tokens()))
    assert (profile.flops_forward, profile.flops_backward) == (real.forward, real.backward)
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)
    without_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert set(profile.unused_parameters) == without_gradient


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_is_kept_or_dropped_as_in_a_real_step(padded: bool) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[0, 8:] = 0
    model = small("llama")
    profile = profile_model(model, tokens(attention_mask=mask), entry="forward")
    real = measure(model, lambda: model(**tokens(attention_mask=mask)))
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)
    inputs = {spec.name: spec for spec in profile.stacks[0].blocks[1].inputs}
    assert ("attention_mask" in inputs) is padded
    if padded:
        assert (inputs["attention_mask"].origin, inputs["attention_mask"].depends_on) == ("prefix", ())


def test_encoder_and_decoder_of_t5() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4, d_kv=8, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    profile = profile_model(model, tokens(), entry="forward")
    assert profile.fallback_reason is None
    assert {stack.name: len(stack.blocks) for stack in profile.stacks} == {"encoder.block": 2, "decoder.block": 3}
    real = measure(model, lambda: model(**tokens()))
    assert (profile.flops_forward, profile.flops_backward) == (real.forward, real.backward)
    assert profile.saved_activation_bytes == pytest.approx(real.saved, rel=0.01)
    shared = next(parameter for parameter in profile.parameters if parameter.name == "shared.weight")
    assert {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"} <= set(shared.aliases)
    assert shared.phases[:2] == ("prefix", "between")
    bias = {spec.name: spec for spec in profile.stacks[1].blocks[2].inputs}["2"]
    assert (bias.origin, bias.depends_on) == ("decoder.block.0", ("decoder.block.0",))


def test_a_model_that_needs_values_of_its_own_says_so() -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("jetmoe", **{**_LLAMA, "kv_channels": 8, "num_local_experts": 4})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="needs an integer read from a tensor.*modeling_jetmoe.py:"):
        profile = profile_model(model, tokens(), entry="forward")
    assert {stack.name: len(stack.blocks) for stack in profile.stacks} == {"model.layers": 3}
