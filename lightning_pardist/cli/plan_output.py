"""Estimates as tables, and as a chart of memory per rank that one HTML file holds."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lightning_pardist.base.errors import message
from lightning_pardist.plan.report import format_bytes
from lightning_pardist.specs.estimate import Candidate, Estimate, MemoryTerms, grouped

TERMS = tuple(field.name for field in fields(MemoryTerms) if field.name != "host")
_COLOURS = ("#4878a8", "#e8a838", "#6aa84f", "#b85450", "#8c6bb1", "#999999", "#5fb3b3")
_LOWER_BOUND = "a lower bound: peaks of data sheets, everything overlapped"


def estimate_text(estimate: Estimate) -> str:
    """Returns one estimate as lines of text."""
    worst = estimate.worst
    rows = [(name.replace("_", " "), _bytes(getattr(worst, name))) for name in TERMS]
    rows.append(("total", format_bytes(worst.total) + _of_device(estimate)))
    if worst.host:
        rows.append(("on the host", format_bytes(worst.host)))
    lines = [f"Memory of rank {estimate.worst_rank}, which holds most of {estimate.world_size}", *_table(rows)]
    pipeline = estimate.plan.pipeline
    if pipeline is not None:
        lines += [
            f"Pipeline ranks ({pipeline.schedule}, idle {estimate.idle_share:.1%})",
            *_table(_stage_rows(estimate)),
        ]
    lines += [
        f"Collectives of rank {estimate.busiest_rank}, which sends most, per optimizer step of one batch",
        *_table(_traffic_rows(estimate)),
    ]
    work = [("forward", f"{estimate.flops_forward:.4g}"), ("backward", f"{estimate.flops_backward:.4g}")]
    if estimate.flops_again:
        work.append(("recomputed", f"{estimate.flops_again:.4g}"))
    lines += [f"FLOPs of the rank that computes most, for one batch ({estimate.batch_rows} rows)", *_table(work)]
    if estimate.roofline is not None:
        roofline = estimate.roofline
        lines += [
            f"Roofline ({_LOWER_BOUND})",
            *_table(
                [
                    ("compute", _seconds(roofline.compute_seconds)),
                    ("communication", _seconds(roofline.communication_seconds)),
                    ("step", f">= {_seconds(roofline.seconds)}"),
                ]
            ),
        ]
    return "\n".join([*lines, *(f"note: {note}" for note in estimate.assumptions)])


def ranking_text(candidates: Sequence[Candidate], fill: float) -> str:
    """Returns the ranked layouts as lines of text."""
    fitting = [c for c in candidates if c.rejected is None]
    rows = [("", "layout", "memory", "step (roofline)", "batches", "time per batch", "sent per rank", "idle")]
    for position, candidate in enumerate(fitting, start=1):
        estimate = candidate.estimate
        assert estimate is not None
        step = ">= " + _seconds(estimate.roofline.seconds) if estimate.roofline else "unknown"
        sent = format_bytes(sum(traffic.sent_per_rank for traffic in estimate.traffic))
        idle = f"{estimate.idle_share:.1%}" if estimate.plan.pipeline is not None else ""
        batches, each = str(estimate.plan.sizes.data_parallel), estimate.seconds_per_batch
        share = "unknown" if each is None else f">= {_seconds(each)}"
        memory = format_bytes(estimate.worst.total)
        rows.append((str(position), candidate.layout, memory, step, batches, share, sent, idle))
    lines = [f"Layouts that fill at most {fill:.0%} of the memory, best first; times are {_LOWER_BOUND}"]
    lines += _table(rows) if fitting else ["  none: more ranks, recomputation per operator or smaller batches are left"]
    if fitting:
        arguments = ", ".join(f"{name}={value}" for name, value in fitting[0].arguments.items())
        lines.append(f"The first: HybridStrategy({arguments})")
    rejected = [c for c in candidates if c.rejected is not None]
    if rejected:
        lines += ["Rejected", *_table([(c.layout, c.rejected or "") for c in rejected])]
    return "\n".join(lines)


def write_chart(estimate: Estimate, path: Path) -> None:
    """Writes a bar chart of memory per rank, as HTML or PNG by the name's ending.

    Raises:
        ValueError: for another ending, or for PNG where matplotlib is not installed.
    """
    groups = _groups(estimate)
    if path.suffix == ".html":
        path.write_text(_page(estimate, groups))
    elif path.suffix == ".png":
        _png(estimate, groups, path)
    else:
        raise _wrong_chart(path, "a name that ends with .html, .png or .json")


def _groups(estimate: Estimate) -> list[tuple[str, MemoryTerms]]:
    """Ranks that hold the same make one bar; bars beyond 64 are left out, the fullest stay."""
    ranks = grouped(estimate.memory_by_rank)
    bars = [(_ranges(members) + _stages_of(estimate, members), terms) for terms, members in ranks.items()]
    return sorted(bars, key=lambda bar: -bar[1].total)[:64]


def _stages_of(estimate: Estimate, ranks: Sequence[int]) -> str:
    """Returns which stages the ranks have; the pipeline axis is the outermost of the mesh."""
    pipeline = estimate.plan.pipeline
    if pipeline is None:
        return ""
    places = {rank * pipeline.ranks // estimate.world_size for rank in ranks}
    stages = sorted(stage.index for place in places for stage in pipeline.stages_of(place))
    return f" (stage {', '.join(map(str, stages))})"


def _axes_words(estimate: Estimate) -> str:
    sizes = ((axis.replace("_", " "), size) for axis, size in estimate.plan.sizes.as_dict().items() if size > 1)
    return ", ".join(f"{axis} {size}" for axis, size in sizes) or "one rank"


def _ranges(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    consecutive = ranks[-1] - ranks[0] == len(ranks) - 1
    return f"ranks {ranks[0]}-{ranks[-1]}" if consecutive else f"rank {ranks[0]} and {len(ranks) - 1} like it"


def _page(estimate: Estimate, groups: Sequence[tuple[str, MemoryTerms]]) -> str:
    limit = estimate.device.memory_bytes if estimate.device else 0.0
    widest = max([terms.total for _, terms in groups] + [limit])
    height, left, width = 26, 260, 720
    parts = []
    for row, (label, terms) in enumerate(groups):
        x, y = float(left), row * height + 10
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
        for name, colour in zip(TERMS, _COLOURS, strict=True):
            size = (getattr(terms, name) or 0) / widest * width if widest else 0
            title = f"{name.replace('_', ' ')}: {_bytes(getattr(terms, name))}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size:.1f}" height="{height - 8}" fill="{colour}">'
                f"<title>{title}</title></rect>"
            )
            x += size
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{format_bytes(terms.total)}</text>')
    bottom = len(groups) * height + 16
    if limit:
        x = left + limit / widest * width
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}" stroke="black" stroke-dasharray="4 3"/>')
    for index, (name, colour) in enumerate(zip(TERMS, _COLOURS, strict=True)):
        parts.append(f'<rect x="{left + index * 130}" y="{bottom + 8}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + index * 130 + 17}" y="{bottom + 18}">{name.replace("_", " ")}</text>')
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 140}" height="{bottom + 36}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )
    title = f"Memory per rank: {estimate.plan.module_class} on {estimate.world_size} ranks ({_axes_words(estimate)})"
    text = html.escape(estimate_text(estimate))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<body><h1>{html.escape(title)}</h1>{svg}<pre>{text}</pre></body></html>\n"
    )


def _png(estimate: Estimate, groups: Sequence[tuple[str, MemoryTerms]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _wrong_chart(path, "a name that ends with .html, or install matplotlib") from error
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(groups)))
    plot = figure.add_subplot()
    starts = [0.0] * len(groups)
    labels = [label for label, _ in groups]
    for name, colour in zip(TERMS, _COLOURS, strict=True):
        sizes = [(getattr(terms, name) or 0) / 2**30 for _, terms in groups]
        plot.barh(labels, sizes, left=starts, color=colour, label=name.replace("_", " "))
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    if estimate.device is not None:
        plot.axvline(estimate.device.memory_bytes / 2**30, linestyle="--", color="black")
    plot.set_xlabel("GiB")
    plot.set_title(f"{estimate.plan.module_class}: {_axes_words(estimate)}")
    plot.legend()
    figure.tight_layout()
    figure.savefig(path)


def _wrong_chart(path: Path, change: str) -> ValueError:
    return ValueError(
        message(
            "A chart of memory per rank is written as .html, or as .png by matplotlib.",
            got=str(path),
            source="--output",
            change=f"use {change}",
        )
    )


def _traffic_rows(estimate: Estimate) -> list[tuple[str, ...]]:
    if not estimate.traffic:
        return [("none",)]
    rows: list[tuple[str, ...]] = [("axis", "collective", "count", "whole tensors", "sent per rank", "links")]
    for each in estimate.traffic:
        links = "between nodes" if each.crosses_nodes else "within a node"
        sizes = format_bytes(each.nbytes), format_bytes(each.sent_per_rank)
        rows.append((each.axis, each.collective, str(each.count), *sizes, links))
    return rows


def _stage_rows(estimate: Estimate) -> list[tuple[str, ...]]:
    pipeline = estimate.plan.pipeline
    assert pipeline is not None
    rows: list[tuple[str, ...]] = [("rank", "stages", "blocks", "most memory", "activations", "FLOPs")]
    width = estimate.world_size // pipeline.ranks
    for place, work in enumerate(estimate.work):
        stages = pipeline.stages_of(place)
        most = max(terms.total for terms in estimate.memory_by_rank[place * width : (place + 1) * width])
        rows.append(
            (
                str(place),
                ", ".join(str(stage.index) for stage in stages),
                str(sum(len(stage.blocks) for stage in stages)),
                format_bytes(most),
                _bytes(work.activation_bytes),
                f"{work.flops_forward + work.flops_backward:.4g}",
            )
        )
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bytes(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _of_device(estimate: Estimate) -> str:
    unknown = f" + {' + '.join(estimate.worst.unknown)}" if estimate.worst.unknown else ""
    if estimate.device is None:
        return unknown
    share = estimate.worst.total / estimate.device.memory_bytes
    return f"{unknown}, {share:.0%} of {estimate.device.name}'s {format_bytes(estimate.device.memory_bytes)}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
