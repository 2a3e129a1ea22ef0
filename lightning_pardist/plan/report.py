"""A plan as a table for people."""

from __future__ import annotations

from itertools import groupby

from lightning_pardist.plan.pipeline_report import pipeline_rows, pipeline_words
from lightning_pardist.specs.parallel_plan import ParallelPlan, ShardUnit, StateBytes
from lightning_pardist.specs.tensor_plan import TensorPlan

_MEANING = {
    "pipeline_parallel": "stages of the block stack",
    "data_parallel_replicate": "copies of the model",
    "data_parallel_shard": "ranks that share one copy",
    "context_parallel": "ranks that share one sequence",
    "tensor_parallel": "ranks that share each matrix",
}


def format_plan(plan: ParallelPlan) -> str:
    """Returns the plan as lines of text: mesh, units, bytes of state, collectives."""
    lines = [f"Plan for {plan.module_class} on {plan.sizes.world_size} rank(s), precision {plan.precision.name}"]
    lines += _section("Mesh (outer to inner)", _mesh_rows(plan))
    lines += _section("Data parallel", _unit_rows(plan))
    if plan.tensor is not None:
        lines += _section("Tensor parallel", _tensor_rows(plan.tensor))
    if plan.pipeline is not None:
        lines += _section(pipeline_words(plan.pipeline), pipeline_rows(plan.pipeline, format_bytes))
        lines += [f"    rank {rank}  {line}" for rank, line in enumerate(plan.pipeline.timeline)]
    lines += _section("State per rank", _state_rows(plan))
    lines += _section("Blocks", _lever_rows(plan)) if plan.recompute.blocks or plan.compile.blocks else []
    if plan.traffic:
        lines += _section("Collectives per step", _traffic_rows(plan))
    notes = [
        *plan.data_parallel.notes,
        *(plan.tensor.notes if plan.tensor is not None else ()),
        *(plan.pipeline.notes if plan.pipeline is not None else ()),
    ]
    lines += [f"  note: {note}" for note in notes]
    return "\n".join(lines)


def format_bytes(nbytes: float) -> str:
    """Returns a byte count with a binary unit, such as ``"1.50 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def _section(title: str, rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    body = ["    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"  {title}", *body]


def _mesh_rows(plan: ParallelPlan) -> list[tuple[str, ...]]:
    return [(axis, str(size), _MEANING[axis]) for axis, size in plan.sizes.as_dict().items()]


def _unit_rows(plan: ParallelPlan) -> list[tuple[str, ...]]:
    data = plan.data_parallel
    if data.kind == "none":
        return [("one data rank", "nothing is sharded or reduced")]
    if data.kind == "replicate":
        return [("replicated", "gradients averaged in buckets while backward runs")]
    rows: list[tuple[str, ...]] = [(f"ZeRO-{data.zero_stage}", f"{len(data.units)} unit(s)", "")]
    for label, group in groupby(data.units, key=_unit_label):
        members = list(group)
        freed = "freed after forward" if members[0].reshard_after_forward else "kept until backward"
        rows.append((f"{len(members)} x", label, freed))
    return rows


def _unit_label(unit: ShardUnit) -> str:
    if unit.is_root:
        return "root (all that is left)"
    if len(unit.modules) > 1:
        return f"{unit.modules[0]} + {len(unit.modules) - 1} more"
    return ".".join("*" if part.isdigit() else part for part in unit.modules[0].split("."))


def _tensor_rows(plan: TensorPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for entry in plan.entries:
        parts = " + ".join(map(str, entry.parts)) if len(entry.parts) > 1 else ""
        rows.append(
            (f"{len(entry.names)} x", entry.pattern, entry.role, entry.source, entry.heads or parts, entry.note)
        )
    return rows


def _state_rows(plan: ParallelPlan) -> list[tuple[str, ...]]:
    rank, one = plan.state_per_rank, plan.state_one_process
    rows: list[tuple[str, ...]] = [("", "each rank", "one process")]
    for label in ("parameters", "gradients", "optimizer"):
        rows.append((label, *(_cell(getattr(side, label)) for side in (rank, one))))
    rows.append(("total", _total(rank), _total(one)))
    return rows


def _lever_rows(plan: ParallelPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    again = plan.recompute
    if again.blocks:
        kept = "keeps its input" if again.mode == "full" else f"keeps its input and the results of {_ops(again.ops)}"
        rows.append(("recomputed", f"{len(again.blocks)} of {again.num_blocks}", kept))
        if again.saved_bytes is not None and again.saved_bytes_without is not None:
            share = f"of {format_bytes(again.saved_bytes_without)} for one batch of a rank"
            rows.append(("activations", format_bytes(again.saved_bytes), share))
    if plan.compile.blocks:
        rows.append(("compiled", f"{len(plan.compile.blocks)}", f"by {plan.compile.options.backend}, one graph each"))
    return rows


def _ops(ops: tuple[str, ...]) -> str:
    names = list(dict.fromkeys(op.removeprefix("aten.").split(".")[0] for op in ops))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _cell(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_bytes(nbytes)


def _total(state: StateBytes) -> str:
    known = state.parameters + state.gradients + (state.optimizer or 0)
    return format_bytes(known) + (" + optimizer" if state.optimizer is None else "")


def _traffic_rows(plan: ParallelPlan) -> list[tuple[str, ...]]:
    return [(t.collective, t.axis, f"{t.count} x", format_bytes(t.nbytes)) for t in plan.traffic]
