"""The measured timeline of one step, as a page that needs nothing else or as a Chrome trace."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from lightning_pardist.base.log import get_logger
from lightning_pardist.run.pipeline import Moment
from lightning_pardist.specs.pipeline_plan import PipelinePlan

log = get_logger(__name__)

_COLOURS = {"F": "#6baed6", "B": "#fd8d3c", "I": "#fdae6b", "W": "#74c476"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def write_timeline(path: str, moments: Sequence[Moment], plan: PipelinePlan) -> None:
    """Writes the actions of all ranks of one pipeline; what lies between them is communication and waiting."""
    if not moments:
        return
    start = min(m.start for m in moments)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = _trace(moments, start) if target.suffix == ".json" else _page(moments, start, plan)
    target.write_text(text, encoding="utf-8")
    log.info("%s: timeline of one step, measured idle share %.1f %%", path, 100 * measured_idle_share(moments))


def measured_idle_share(moments: Sequence[Moment]) -> float:
    """Returns the share of the step in which ranks computed nothing: they communicated or waited."""
    ranks = {m.rank for m in moments}
    length = max(m.end for m in moments) - min(m.start for m in moments)
    busy = sum(m.end - m.start for m in moments)
    return 1.0 - busy / (length * len(ranks)) if length else 0.0


def _trace(moments: Sequence[Moment], start: float) -> str:
    events = [
        {
            "name": f"{m.stage}{m.kind}{m.micro}",
            "cat": _WORDS[m.kind],
            "ph": "X",
            "ts": (m.start - start) * 1e6,
            "dur": (m.end - m.start) * 1e6,
            "pid": 0,
            "tid": m.rank,
        }
        for m in moments
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _page(moments: Sequence[Moment], start: float, plan: PipelinePlan) -> str:
    length = max(m.end for m in moments) - start
    height, width = 34, 1200
    bars = []
    for m in moments:
        x, w = (m.start - start) / length * width, max((m.end - m.start) / length * width, 0.5)
        title = f"{_WORDS[m.kind]}, stage {m.stage}, micro-batch {m.micro}, {(m.end - m.start) * 1e3:.2f} ms"
        bars.append(
            f'<g><title>{title}</title><rect x="{x:.2f}" y="{m.rank * height + 4}" width="{w:.2f}" height="26" '
            f'fill="{_COLOURS[m.kind]}" stroke="white"/><text x="{x + 3:.2f}" y="{m.rank * height + 21}">{m.micro}'
            "</text></g>"
        )
    legend = " ".join(f'<span style="background:{_COLOURS[k]}">&nbsp;{w}&nbsp;</span>' for k, w in _WORDS.items())
    idle = measured_idle_share(moments)
    head = (
        f"{html.escape(plan.schedule)}, {plan.ranks} ranks, {plan.num_microbatches} micro-batches: "
        f"{length * 1e3:.1f} ms, idle {100 * idle:.1f} % measured, {100 * plan.idle_share:.1f} % foretold"
    )
    return (
        "<!doctype html><meta charset='utf-8'><title>Pipeline timeline</title>"
        "<style>body{font:14px sans-serif}text{font:11px sans-serif}svg{background:#eee}</style>"
        f"<h3>{head}</h3><p>{legend} and grey: communication and waiting</p>"
        f"<svg width='{width}' height='{plan.ranks * height}'>{''.join(bars)}</svg>"
    )
