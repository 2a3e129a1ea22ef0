"""How much of transformers ``profile_model`` can describe, and how long large models take.

    python benchmarks/describe.py                both
    python benchmarks/describe.py zoo            every causal language model, 4 blocks, width 64
    python benchmarks/describe.py zoo NAME ...   some of them, by model type
    python benchmarks/describe.py large          Llama shapes of 8B and 70B on the meta device

A model counts if its unchanged forward and backward run for real from its small config. It is described if the profile
comes from the fake run and has a stack with as many blocks as the config has layers; FLOPs (forward and backward) and
saved activation bytes are then compared with those of the real run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import resource
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
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


@dataclass
class Row:
    """What became of one architecture."""

    model_type: str
    status: str
    stack: str = ""
    blocks: int = 0
    fallback: str = ""
    flops_forward_error: float = 0.0
    flops_backward_error: float = 0.0
    saved_bytes_error: float = 0.0
    assumptions: int = 0
    seconds: float = 0.0


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


def small_model(model_type: str, settings: dict[str, Any]) -> nn.Module:
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
    first: Exception | None = None
    for settings in ATTEMPTS:
        try:
            model = small_model(model_type, settings).train()
            measure(model, batch)
        except Exception as error:
            first = first or error
        else:
            return model
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


def describe_one(model_type: str) -> Row:
    """Returns the row of one architecture."""
    from lightning_pardist.describe import profile_model

    batch = sample()
    try:
        model = running_model(model_type, batch)
    except Exception as error:
        return Row(model_type, "does not run", fallback=f"{type(error).__name__}: {str(error)[:100]}")
    profile = profile_model(model, batch, entry="forward")
    forward, backward, saved = measure(model, batch)
    largest = max(profile.stacks, key=lambda stack: len(stack.blocks), default=None)
    row = Row(
        model_type,
        status="described" if profile.source == "fake_run" else "module tree",
        stack=", ".join(f"{stack.name}[{len(stack.blocks)}]" for stack in profile.stacks),
        blocks=len(largest.blocks) if largest else 0,
        fallback=profile.fallback_reason or "",
        flops_forward_error=_relative(profile.flops_forward, forward),
        flops_backward_error=_relative(profile.flops_backward, backward),
        saved_bytes_error=_relative(profile.saved_activation_bytes, saved),
        assumptions=len(profile.assumptions),
        seconds=profile.seconds,
    )
    if row.status == "described" and row.blocks != _layers(model.config):
        row.status = "wrong stack"
    return row


def _layers(config: Any) -> int:
    text = config.get_text_config()
    names = ("num_hidden_layers", "num_decoder_layers", "decoder_layers", "n_layer", "n_layers", "num_layers")
    return next(int(getattr(text, name)) for name in names if isinstance(getattr(text, name, None), int))


def _relative(found: int, real: int) -> float:
    return abs(found - real) / real if real else float(found != 0)


def zoo(names: list[str]) -> list[Row]:
    """Describes every causal language model of the installed transformers (or those named)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logging.disable(logging.ERROR)
    rows = []
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        quiet = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            warnings.simplefilter("ignore")
            try:
                row = describe_one(name)
            except Exception as error:
                row = Row(name, "failed", fallback=f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(row)), flush=True)
        rows.append(row)
    return rows


@dataclass
class Large:
    """Time and memory of describing one large model."""

    name: str
    parameters: int
    blocks: int
    seconds: float
    cpu_seconds: float
    flops_forward: int
    saved_activation_bytes: int
    resident_growth_bytes: int


_LLAMAS = {
    "Llama-shaped 8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                        "num_attention_heads": 32},
    "Llama-shaped 70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                         "num_attention_heads": 64},
}  # fmt: skip


def large() -> list[Large]:
    """Describes Llama shapes on meta, one sequence of 4096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_pardist.describe import profile_model

    tokens = torch.zeros(1, 4096, dtype=torch.long)
    found = []
    for name, shape in _LLAMAS.items():
        config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **shape)
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        profile = profile_model(model, {"input_ids": tokens, "labels": tokens}, entry="forward")
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert profile.fallback_reason is None, profile.fallback_reason
        row = Large(
            name,
            profile.num_parameters,
            len(profile.stacks[0].blocks),
            profile.seconds,
            time.process_time() - started,
            profile.flops_forward,
            profile.saved_activation_bytes,
            growth,
        )
        print(json.dumps(asdict(row)), flush=True)
        found.append(row)
    return found


def report(rows: list[Row], sizes: list[Large]) -> str:
    """Returns the results as Markdown."""
    import transformers

    ran = [row for row in rows if row.status != "does not run"]
    described = [row for row in ran if row.status == "described"]
    exact = [row for row in described if max(row.flops_forward_error, row.flops_backward_error) == 0]
    close = [row for row in described if row.saved_bytes_error <= 0.01]
    lines = [
        "# describe: results",
        "",
        "Command: `python benchmarks/describe.py --write benchmarks/results/describe.md`",
        f"(torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} CPU cores).",
        "",
        f"## Causal language models of transformers: {len(described)} of {len(ran)} that run small are described",
        "",
        "| what | models |",
        "| --- | --- |",
        f"| listed by transformers | {len(rows)} |",
        f"| run forward and backward for real from a small config | {len(ran)} |",
        f"| described by the fake run, with a stack | {len(described)} ({len(described) / len(ran):.1%} of those) |",
        f"| FLOPs, forward and backward, equal to the real run's | {len(exact)} |",
        f"| saved activation bytes within 1 % of the real run's | {len(close)} |",
        f"| largest difference in saved activation bytes | {max(row.saved_bytes_error for row in described):.2%} |",
        f"| time to describe, median and longest | {_times(described)} |",
        "",
        "Not described, and why:",
        "",
        *(f"- {row.model_type}: {row.status}. {row.fallback}".rstrip() for row in ran if row.status != "described"),
        "",
        "| model | stacks | saved bytes off by | seconds |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row.model_type} | {row.stack} | {row.saved_bytes_error:.2%} | {row.seconds:.2f} |"
            for row in described
            if row.saved_bytes_error > 1e-3 or "," in row.stack
        ),
        "",
        "(The table shows models with several stacks or a difference above 0.1 %; all others have one stack and none.)",
        "",
        "Do not run small: " + ", ".join(row.model_type for row in rows if row.status == "does not run") + ".",
        "",
        "## Large models on meta, one sequence of 4096 tokens",
        "",
        "| model | parameters | blocks | seconds | CPU seconds | forward TFLOPs | saved GiB | resident growth MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {size.name} | {size.parameters:,} | {size.blocks} | {size.seconds:.1f} | {size.cpu_seconds:.1f} "
            f"| {size.flops_forward / 1e12:.1f} | {size.saved_activation_bytes / 2**30:.1f} "
            f"| {size.resident_growth_bytes / 2**20:.0f} |"
            for size in sizes
        ),
        "",
    ]
    # Lines of code in site-packages are told without the folders of this machine.
    return "\n".join(re.sub(r"\S*/site-packages/", "", line) for line in lines)


def _times(rows: list[Row]) -> str:
    return f"{median(row.seconds for row in rows):.2f} s, {max(row.seconds for row in rows):.1f} s"


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("all", "zoo", "large"), default="all")
    parser.add_argument("names", nargs="*", help="model types, for zoo")
    parser.add_argument("--write", type=Path, help="write the results there, as Markdown")
    arguments = parser.parse_args()
    sizes = large() if arguments.part in ("all", "large") else []
    rows = zoo(arguments.names) if arguments.part in ("all", "zoo") else []
    if arguments.write and rows and sizes:
        arguments.write.write_text(report(rows, sizes))


if __name__ == "__main__":
    main()
