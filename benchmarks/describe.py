"""How much of transformers ``profile_model`` can describe, and how long large models take.

    python -m benchmarks.describe                both
    python -m benchmarks.describe zoo            every causal language model, 4 blocks, width 64
    python -m benchmarks.describe zoo NAME ...   some of them, by model type
    python -m benchmarks.describe large          Llama shapes of 8B and 70B on the meta device

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

from benchmarks.support.small_models import measure, running_model, sample


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
        "Command: `python -m benchmarks.describe --write benchmarks/results/describe.md`",
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
