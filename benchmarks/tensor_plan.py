"""The plan derived from the flow of data against the plan that transformers ships, entry by entry.

    python -m benchmarks.tensor_plan                 every architecture with a plan, 4 blocks, width 64
    python -m benchmarks.tensor_plan NAME ...        some of them, by model type, with every entry that differs
    python -m benchmarks.tensor_plan --write FILE    the whole table as a page

An architecture is a causal language model of transformers whose config has a ``base_model_tp_plan`` and which runs
small from its config (as in ``describe.py``). Names are used to compare, never to derive. Shipped words are mapped:

    colwise                  column, or fused_column
    packed_colwise           fused_column, or column where the parts lie within each head
    rowwise, packed_rowwise  row
    colwise_gather_output    replicate (the output is gathered at once); of the head: vocab
    rowwise_split_input      replicate (the whole input is cut at once)
    embedding_rowwise        vocab

For stacks of experts, whose input and output features lie either way round, the sharded dim is compared. What is no
linear layer is left out, but a norm that the shipped plan keeps whole counts. Every kind of region is then proved by
numbers for two ranks (``tests/tensor_plan/judge.py``): what one rank computes depends on its own share alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

_WORDS = {
    "colwise": ("column", "fused_column"), "packed_colwise": ("fused_column", "column"), "rowwise": ("row",),
    "packed_rowwise": ("row",), "colwise_gather_output": ("replicate",), "rowwise_split_input": ("replicate",),
    "replicate": ("replicate",), "embedding_rowwise": ("vocab",), "replicated_with_grad_allreduce": ("replicate",),
    "mla_kv_a_proj": ("replicate",), "embedding_colwise": ("column",),
}  # fmt: skip
_PROOF_SECONDS = 15
"""No further region of an architecture is proved after this time (recurrences over time are slow on the CPU)."""
_NO_WEIGHT = {"moe_tp_experts", "local_params", "all_reduce", "moe_identity_expert"}


@dataclass
class Row:
    """One architecture."""

    model_type: str
    status: str = ""
    agree: int = 0
    more: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    is_moe: bool = False
    seconds: float = 0.0
    proved: int = 0
    not_proved: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.status:
            return self.status
        if self.differs:
            return "differs"
        return "ours shards more" if self.more or self.linears_beyond else "agrees"

    @property
    def linears_beyond(self) -> list[str]:
        """What ours shards, other than the vocabulary, where the shipped plan says nothing."""
        return [entry for entry in self.extra if not entry.endswith("vocab")]


def shipped_plan(model: nn.Module) -> dict[str, str]:
    """Returns the plan with patterns from the model's root."""
    text = model.config.get_text_config()
    base = type(text).base_model_tp_plan
    bases = [name for name, m in model.named_modules() if getattr(m, "config", None) is text and hasattr(m, "layers")]
    prefix = bases[0] if bases else model.base_model_prefix
    plan = {f"{prefix}.{pattern}": word for pattern, word in base.items()}
    return plan | dict(getattr(type(model), "_tp_plan", None) or {})


def compare(model_type: str, batch: dict[str, torch.Tensor]) -> Row:
    """Returns what became of one architecture."""
    from benchmarks.support.small_models import running_model
    from lightning_pardist.describe.linear_roles import derive_roles

    row = Row(model_type)
    started = time.perf_counter()
    try:
        model = running_model(model_type, batch)
    except Exception as error:
        row.status = f"does not run small ({type(error).__name__})"
        return row
    try:
        roles = derive_roles(model, batch, entry="forward")
    except Exception as error:
        row.status = f"not derived: {error}".splitlines()[0]
        return row
    row.unknown, row.seconds = tuple(name for name, _ in roles.unknown_functions), time.perf_counter() - started
    plan = shipped_plan(model)
    row.is_moe = any("expert" in pattern for pattern in plan)
    ours = {weight.name: weight for weight in roles.weights}
    sharded = {parameter.name for region in roles.regions for parameter in region.parameters}
    seen: set[str] = set()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, word in plan.items():
        _compare_entry(row, pattern, word, names, ours, sharded, seen)
    for name, weight in ours.items():
        if name not in seen and weight.role not in ("replicate",):
            entry = f"{_star(name)}: {weight.role}"
            if entry not in row.extra:
                row.extra.append(entry)
    prove(row, model, roles, batch)
    return row


def prove(row: Row, model: nn.Module, roles: Any, batch: dict[str, torch.Tensor]) -> None:
    """Notes whether one region of each kind stands for two ranks."""
    from tests.tensor_plan.judge import changes

    kinds = {tuple(map(_star, region.openers + region.closers)): region for region in reversed(roles.regions)}
    model.eval()
    started = time.perf_counter()
    for kind, region in kinds.items():
        if region.units % 2 or time.perf_counter() - started > _PROOF_SECONDS:
            row.not_proved.append(f"{kind[-1]} (not tried)")
            continue
        try:
            with torch.no_grad():
                moved = changes(model, roles, lambda: model(**batch, use_cache=False).logits, only=[region.index])
        except Exception as error:
            row.not_proved.append(f"{kind[-1]} ({type(error).__name__}: {str(error)[:80]})")
            continue
        if moved[region.index] < 1e-5:
            row.proved += 1
        else:
            row.not_proved.append(f"{kind[-1]} (output changes by {moved[region.index]:.1e})")


def _compare_entry(
    row: Row, pattern: str, word: str, names: list[str], ours: dict[str, Any], sharded: set[str], seen: set[str]
) -> None:
    if word in _NO_WEIGHT:
        return
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"(\.weight)?$")
    matched = [name for name in names if regex.match(name)]
    if not matched:
        row.unused.append(f"{pattern} (no such weight)")
        return
    outcomes: Counter[str] = Counter()
    for name in matched:
        key = name.removesuffix(".weight")
        seen.add(key)
        outcomes[_outcome(word, pattern, key, name, ours, sharded)] += 1
    for outcome in outcomes:
        kind, _, detail = outcome.partition("|")
        line = f"{pattern}: {word}, ours {detail}"
        if kind == "agree":
            row.agree += 1
        elif kind == "more":
            row.more.append(line)
        elif kind == "unused":
            row.unused.append(pattern)
        else:
            row.differs.append(line)


def _outcome(word: str, pattern: str, key: str, name: str, ours: dict[str, Any], sharded: set[str]) -> str:
    expected = _WORDS[word]
    weight = ours.get(key)
    if weight is None:  # no linear layer: a norm, or a layer that the step never called
        if word == "replicated_with_grad_allreduce":
            return "more|sharded with its region" if name in sharded else "agree|"
        return "unused|"
    if not name.endswith(".weight") and len(weight.shape) == 3 and weight.dim is not None:
        return "agree|" if weight.dim == (2 if word.endswith("rowwise") else 1) else f"differs|dim {weight.dim}"
    if weight.role in expected or (word == "colwise_gather_output" and weight.role == "vocab"):
        return "agree|"
    if expected == ("replicate",):
        return f"more|{weight.role}"
    return f"differs|{weight.role}" + (f" ({weight.reason})" if weight.reason else "")


def _star(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def architectures() -> list[str]:
    """Returns the model types with a shipped plan."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(Exception):
            if type(AutoConfig.for_model(model_type).get_text_config()).base_model_tp_plan:
                found.append(model_type)
    return found


def page(rows: list[Row]) -> str:
    """Returns the table as markdown."""
    import transformers

    derived = [row for row in rows if not row.status]
    ran = [row for row in rows if not row.status.startswith("does not run")]
    dense = [row for row in derived if not row.is_moe]
    counts = {kind: Counter(row.verdict for row in group) for kind, group in (("all", derived), ("dense", dense))}
    lines = [
        "# Derived tensor-parallel plans against those that transformers ships", "",
        "Command: `python -m benchmarks.tensor_plan --write benchmarks/results/tensor_plan.md`",
        f"(torch {torch.__version__}, transformers {transformers.__version__}).", "",
        "Roles only: that the derived plans train like one process is what `benchmarks/zoo.py` shows.", "",
        "| | all | dense |", "| --- | --- | --- |",
        f"| causal language models with a shipped plan | {len(rows)} | |",
        f"| run small from their config | {len(ran)} | |",
        f"| derived | {len(derived)} | {len(dense)} |",
    ]  # fmt: skip
    for verdict in ("agrees", "ours shards more", "differs"):
        lines.append(f"| {verdict} | {counts['all'][verdict]} | {counts['dense'][verdict]} |")
    entries = (
        sum(row.agree for row in derived),
        sum(len(row.more) for row in derived),
        sum(len(r.differs) for r in derived),
    )
    proved, open_ = sum(row.proved for row in derived), sum(len(row.not_proved) for row in derived)
    lines += ["", f"Kinds of regions proved by numbers for two ranks: {proved} of {proved + open_}."]
    lines += ["", f"Entries: {entries[0]} agree, {entries[1]} where ours shards more, {entries[2]} differ.", "",
              "## Entries that differ", ""]  # fmt: skip
    lines += [f"- {row.model_type}{' (MoE)' if row.is_moe else ''}: {line}" for row in derived for line in row.differs]
    lines += ["", "## All", "", "| model | kind | verdict | entries that agree | shipped replicates, ours shards | "
              "sharded by ours, not in the shipped plan | shipped, but not used in the step | proved regions |",
              "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in derived:
        cells = [row.model_type, "MoE" if row.is_moe else "dense", row.verdict, str(row.agree)]
        proofs = [str(row.proved), *(f"not: {kind}" for kind in row.not_proved)]
        lines.append(
            "| "
            + " | ".join([*cells, *("<br>".join(c) or "-" for c in (row.more, row.extra, row.unused, proofs))])
            + " |"
        )
    lines += ["", "## Not derived", ""]
    lines += [f"- {row.model_type}: {row.status}" for row in rows if row.status]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from benchmarks.support.small_models import sample

    rows = []
    for name in given.names or architectures():
        with contextlib.redirect_stderr(io.StringIO()):
            row = compare(name, sample())
        rows.append(row)
        print(
            f"{row.model_type:28s} {row.verdict:20s} agree {row.agree:3d}  {row.seconds:5.1f} s  {row.unknown or ''}",
            flush=True,
        )
        for line in row.differs:
            print("    differs", line)
        for line in row.not_proved:
            print("    not proved", line)
        if given.names:
            print("    more", row.more, "extra", row.extra, "unused", row.unused)
        if given.write:
            given.write.write_text(page(rows))
    if not given.write:
        print(page(rows)[:1500])


if __name__ == "__main__":
    main()
