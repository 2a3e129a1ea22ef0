"""Models of transformers as small as they run, from their configs alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BLOCKS, WIDTH, VOCABULARY, ROWS, LENGTH = 4, 64, 128, 2, 16
_MOST_PARAMETERS = 120_000_000
_SMALL: dict[str, Any] = {
    "num_hidden_layers": BLOCKS, "n_layer": BLOCKS, "n_layers": BLOCKS, "num_layers": BLOCKS, "encoder_layers": 2,
    "decoder_layers": BLOCKS, "decoder_num_layers": BLOCKS, "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH,
    "dim": WIDTH, "embed_dim": WIDTH, "intermediate_size": 2 * WIDTH, "ffn_dim": 2 * WIDTH, "n_inner": 2 * WIDTH,
    "d_ff": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip


_LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "kv_lora_rank": 16,
           "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "rotary_dim": 8}  # fmt: skip
_HYBRID = {"attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
           "expert_layer_offset": 1, "mamba_n_heads": 8, "mamba_d_head": 16, "num_heads": 8, "head_dim": 16,
           "layer_types": ["linear_attention", "full_attention"] * 2}  # fmt: skip
_WITHOUT_HEADS = {key: value for key, value in _SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
_NO_HEAD_DIM = {key: value for key, value in _SMALL.items() if key != "head_dim"}
ATTEMPTS = (
    _SMALL,
    {**_WITHOUT_HEADS, **_LATENT},
    {**_SMALL, **_LATENT, "num_key_value_heads": 4},
    {**_SMALL, **_HYBRID, "layer_types": ["mamba", "attention"] * 2, "layers_block_type": ["mamba", "attention"] * 2},
    {**_SMALL, **_HYBRID},
    {**_NO_HEAD_DIM, **_LATENT, "num_key_value_heads": 4},
    {**_NO_HEAD_DIM, **_LATENT, "num_key_value_heads": 4, "num_layers": 2},
    {**_SMALL, "layer_types": ["conv", "full_attention"] * 2},
    {**_SMALL, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {**_WITHOUT_HEADS, **_LATENT, "num_hidden_layers": 8},
    {key: value for key, value in _SMALL.items() if key not in ("head_dim", "num_experts", "intermediate_size")},
    {"num_hidden_layers": BLOCKS, "vocab_size": VOCABULARY, "pad_token_id": 0},
)
"""Ways to make a config small, tried in turn until the model runs: no way suits them all."""


def small_model(
    model_type: str, settings: dict[str, Any], prepare: Callable[[Any], None] = lambda config: None
) -> nn.Module:
    """Returns the causal language model of that type, random weights, with those settings that its config has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {key: value for key, value in settings.items() if hasattr(AutoConfig.for_model(model_type), key)}
    try:
        config = AutoConfig.for_model(model_type, **known)
    except Exception:
        config = AutoConfig.for_model(model_type)
        _set(config, known)
    if config.get_text_config() is not config:
        _set(config.get_text_config(), settings)
    prepare(config)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: its config cannot be made small by the usual names")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def _set(config: Any, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        with contextlib.suppress(Exception):
            if hasattr(config, key):
                setattr(config, key, value)
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        with contextlib.suppress(Exception):
            setattr(config, key, getattr(config, key)[:BLOCKS])


def running_model(model_type: str, batch: dict[str, torch.Tensor]) -> nn.Module:
    """Returns the model as small as it runs for real, or raises what the first attempt did."""
    return running_attempt(model_type, batch)[1]


def running_attempt(
    model_type: str, batch: dict[str, torch.Tensor], prepare: Callable[[Any], None] = lambda config: None
) -> tuple[int, nn.Module]:
    """Returns which of the attempts ran, and the model; raises what the first attempt did if none runs."""
    first: Exception | None = None
    for index, settings in enumerate(ATTEMPTS):
        try:
            model = small_model(model_type, settings, prepare).train()
            measure(model, batch)
        except Exception as error:
            first = first or error
        else:
            return index, model
    assert first is not None
    raise first


def sample() -> dict[str, torch.Tensor]:
    """Returns one batch, as keyword arguments."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def measure(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Returns forward FLOPs, backward FLOPs and saved activation bytes of a real step."""
    from torch.utils.flop_counter import FlopCounterMode

    from lightning_pardist.describe.flops import extra_formulas

    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, FlopCounterMode(display=False, custom_mapping=extra_formulas()) as counter:
        loss = module(**batch).loss
        forward = counter.get_total_flops()
        loss.backward()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return forward, counter.get_total_flops() - forward, saved
