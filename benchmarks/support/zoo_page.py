"""The zoo's results as a page."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from itertools import islice

from benchmarks.support.zoo_rows import Row, Verdict

KINDS = ("equal", "not sharded", "refused", "wrong")
TARGETS = {"fsdp": 95, "pp": 90, "tp": 90}
_HEAD = """# One process against two: models as they are

Command: `ZOO_SITE=<folder> python -m benchmarks.zoo --write benchmarks/results/zoo.md`, where the folder comes from
`pip install --no-deps --target <folder> timm torchvision pillow` ({versions}; {cores} CPU cores).

Two steps of SGD with clipping, the same global batch of four rows, random weights, dropout off, fp32, gloo on the
CPU. *Equal*: losses, each gradient before clipping, the factor of clipping and the weights at the end within 1e-5 of
one process, relative to their own largest element (gradients: at least to a tenth of the model's largest gradient
element; weights: at least to 0.1). *64-bit*: equal in 64-bit numbers under the same bound, where fp32 rounds more
coarsely than that. *Within its own rounding*: one process whose first weights are moved by 5e-7 of themselves differs
by more from one process than the layout does. *As accumulated*: equal to one process that accumulates the same parts
(the loss is not a mean over rows). *Whole batch*: equal with one micro-batch, for the same reason. *Not sharded*: no
linear layers open and close a region, so tensor parallel is refused; "0 regions" means that the vocabulary alone is
sharded. Batch norms: `sync_batchnorm=True`; pipelines with them take the batch in one micro-batch.
"""


def page(rows: list[Row], everything: dict[str, list[str]]) -> str:
    """Returns the page.

    Args:
        rows: what was measured.
        everything: names of all cases by family; none where it is not installed.
    """
    lines = [_HEAD.format(versions=_versions(), cores=os.cpu_count())]
    lines += _shares([row for row in rows if not row.unusable])
    for family, members in everything.items():
        lines += _family(family, members, {row.name: row for row in rows})
    lines += _reasons(rows)
    text = "\n".join(lines).replace(os.getcwd() + os.sep, "")
    return re.sub(r"\S*/site-packages/", "", text) + "\n"


def _versions() -> str:
    found = []
    places = [*sys.path, os.environ.get("ZOO_SITE", "")]
    for name in ("torch", "lightning", "transformers", "timm", "torchvision"):
        for distribution in islice(distributions(name=name, path=places), 1):
            found.append(f"{name} {distribution.version}")
    return ", ".join(found)


def _shares(rows: Sequence[Row]) -> list[str]:
    lines = ["## Shares", "", "| models | layout | equal | not sharded | refused | wrong | of them | equal, target |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    groups = {"all": rows}
    for row in rows:
        groups.setdefault(row.name.split("/")[0], [])
    for name in list(groups)[1:]:
        groups[name] = [row for row in rows if row.name.startswith(name + "/")]
    for group, members in groups.items():
        for layout in TARGETS:
            counts = Counter(row.layouts[layout].kind for row in members if layout in row.layouts)
            total = sum(counts.values())
            if total:
                cells = [str(counts[kind]) for kind in KINDS]
                share = f"{counts['equal'] / total:.1%}, {TARGETS[layout]} %"
                lines.append("| " + " | ".join([group, layout, *cells, str(total), share]) + " |")
    return [*lines, ""]


def _family(family: str, members: Sequence[str], rows: dict[str, Row]) -> list[str]:
    if not members:
        return [f"## {family}", "", "Not installed.", ""]
    found = [rows[name] for name in members if name in rows]
    lines = [f"## {family}: {sum(1 for row in found if not row.unusable)} models", "",
             "| model | parameters | fsdp 2 | tp 2 | pp 2 |", "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in found:
        if not row.unusable:
            cells = [_cell(row.layouts.get(layout)) for layout in ("fsdp", "tp", "pp")]
            lines.append("| " + " | ".join([_short(row.name), f"{row.parameters:,}", *cells]) + " |")
    if unusable := [row for row in found if row.unusable]:
        lines += ["", "Not compared, for it does not run in one process, or not twice the same:", ""]
        lines += [f"- {_short(row.name)}: {row.unusable}" for row in unusable]
    if left := [_short(name) for name in members if name not in rows]:
        lines += ["", f"Not measured in this run ({len(left)} of {len(members)} listed): {', '.join(left)}."]
    return [*lines, ""]


def _short(name: str) -> str:
    return name.split("/", 1)[1]


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    if verdict.kind != "equal":
        return f"**{verdict.kind}**"
    how = f", {verdict.how}" if verdict.how else ""
    return f"equal{how} ({verdict.error:.0e}); {verdict.details}"


def _reasons(rows: Sequence[Row]) -> list[str]:
    lines = ["## What is not equal, and why", ""]
    for layout in TARGETS:
        for kind in KINDS[1:]:
            reasons: dict[str, list[str]] = {}
            for row in rows:
                verdict = row.layouts.get(layout)
                if verdict is not None and verdict.kind == kind:
                    reasons.setdefault(_reason(verdict), []).append(_short(row.name))
            if reasons:
                lines += [f"### {layout}, {kind}", ""]
                lines += [f"- {', '.join(names)}: {reason}" for reason, names in reasons.items()]
                lines.append("")
    return lines


def _reason(verdict: Verdict) -> str:
    """Returns the rule and what was got, on one line."""
    text = verdict.reason.split("\n  From: ")[0].replace("\n  Got: ", " Got: ")
    return " ".join(text.split())[:500]
