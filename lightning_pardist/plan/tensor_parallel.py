"""Roles of weights and the user's words become a tensor-parallel plan: data that says what is sharded and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_pardist.base.errors import message
from lightning_pardist.plan.tensor_layouts import lay_out, too_few_units, with_tied_regions
from lightning_pardist.plan.tensor_words import matches, weight_words, word_of
from lightning_pardist.specs.tensor_plan import RegionFit, TensorPlan, TensorPlanEntry
from lightning_pardist.specs.tensor_roles import TensorRegion, TensorRole, TensorRoles, WeightRole
from lightning_pardist.specs.tensor_words import OWNER, Given, Source

_INSIDE = ("column", "fused_column", "row")
"""Words for what opens and closes regions."""


@dataclass(frozen=True)
class _Decision:
    weight: WeightRole
    role: TensorRole
    source: Literal["explicit", "module", "derived"]
    parts: tuple[int, ...]
    note: str


def make_tensor_plan(
    roles: TensorRoles,
    *,
    size: int,
    explicit: Mapping[str, Given] | None = None,
    module_plan: Mapping[str, Given] | None = None,
) -> TensorPlan:
    """Returns the plan for a tensor axis of ``size`` ranks.

    What ``explicit`` names counts, then what ``module_plan`` names, and for all other weights what was derived. A
    region of which one weight is taken out (``replicate``) is left alone as a whole, except for what else was named.

    Args:
        roles: what the flow of data says.
        size: ranks of the tensor axis.
        explicit: module name pattern -> word or style of torch; ``*`` stands for one part of a name
            (``"model.layers.*.mlp.up_proj"``). Words about the sequence are none of this function's.
        module_plan: the same, from the module itself.

    Raises:
        ValueError: for a pattern that matches no linear layer or embedding, an unknown word, or a word that the weight
            cannot have.
    """
    assert size >= 1
    named: dict[str, tuple[TensorRole, Source]] = {}
    for pattern, given, source in weight_words({"module": module_plan, "explicit": explicit}):
        for weight in _matching(pattern, source, roles):
            named[weight.name] = word_of(pattern, given, weight.kind, source), source
    _check_pairs(roles, named)
    taken_out = [weight for weight in roles.weights if weight.name in named and named[weight.name][0] == "replicate"]
    broken = {weight.region: weight.name for weight in taken_out if weight.region is not None}
    broken_why = {index: f"{name} of its region is replicated" for index, name in broken.items()}
    broken_why |= {i: why for i, why in too_few_units(roles.regions, size).items() if i not in broken_why}
    broken_why = with_tied_regions(broken_why, roles)
    decisions = [_decide(weight, named.get(weight.name), broken_why) for weight in roles.weights]
    kept = [region for region in roles.regions if region.index not in broken_why]
    fits = tuple(_fit(region, size) for region in kept)
    sharded = lay_out(roles, [(d.weight, d.role) for d in decisions], kept, size)
    return TensorPlan(
        module_class=roles.module_class,
        size=size,
        entries=tuple(_entries(decisions, {region.index: region for region in kept})),
        fits=tuple(dict.fromkeys(fits)),
        notes=tuple(_notes(fits, decisions, roles, size)),
        **sharded,
    )


def collapsed(name: str) -> str:
    """Returns the name with ``*`` for every index."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _matching(pattern: str, source: Source, roles: TensorRoles) -> list[WeightRole]:
    found = [weight for weight in roles.weights if matches(pattern, weight.name)]
    if not found:
        known = list(dict.fromkeys(collapsed(weight.name) for weight in roles.weights))
        raise ValueError(
            message(
                "Every pattern of a tensor-parallel plan must match a linear layer or an embedding that the step uses.",
                got=f"{pattern!r}, which matches none in {roles.module_class}",
                source=OWNER[source],
                change=f"correct or remove it; there are: {', '.join(known)}",
            )
        )
    return found


def _decide(weight: WeightRole, named: tuple[TensorRole, Source] | None, broken: Mapping[int, str]) -> _Decision:
    if named is None:
        if weight.region is not None and weight.region in broken:
            return _Decision(weight, "replicate", "derived", (), broken[weight.region])
        return _Decision(weight, weight.role, "derived", weight.parts, weight.reason)
    role, source = named
    if role == weight.role:
        return _Decision(weight, role, source, weight.parts, weight.reason)
    _check_word(weight, role, source)
    note = "" if role == "replicate" else f"derived: {weight.role}"
    note += f" ({weight.reason})" if note and weight.reason else ""
    return _Decision(weight, role, source, (), note)


def _check_word(weight: WeightRole, role: TensorRole, source: Source) -> None:
    """Refuses words for which the weight's layout is not known."""
    rule = None
    if weight.kind == "embedding" and role not in ("vocab", "replicate"):
        rule = "An embedding has no input features to shard: its rows are shared out with the word vocab."
    elif role == "fused_column":
        rule = "fused_column needs to know the parts of the weight, which come from how the code splits its output."
    elif role == "column" and weight.role == "fused_column":
        rule = "A fused weight cannot be sharded as one: each of its parts must be spread over the ranks."
    if rule is not None:
        raise ValueError(
            message(
                rule,
                got=f"{role} for {weight.name}, of shape {weight.shape}, derived as {weight.role}"
                + (f" with parts {weight.parts}" if len(weight.parts) > 1 else ""),
                source=OWNER[source],
                change=f"use {weight.role}" + (", or replicate" if weight.role != "replicate" else ""),
            )
        )


def _check_pairs(roles: TensorRoles, named: Mapping[str, tuple[TensorRole, Source]]) -> None:
    """Refuses words that leave a region half sharded: its shares would be taken for whole tensors, or the reverse."""
    given = [(weight, *named[weight.name]) for weight in roles.weights if weight.name in named]
    whole = {weight.region: weight.name for weight, role, _ in given if role == "replicate"} | {None: ""}
    alone = [
        (w, role, source) for w, role, source in given if w.kind == "linear" and role in _INSIDE and w.region in whole
    ]
    for weight, role, source in alone:
        wanted = ("row",) if role != "row" else ("column", "fused_column")
        if weight.region is None and any(other in wanted for _, other, _ in alone):
            continue
        if weight.region is None:
            rule = "A column layer must be closed by a row layer, and a row layer opened by a column layer."
            got = f"{role} for {weight.name}, and no {wanted[0]} layer outside the derived regions"
        else:
            rule = "A region is sharded as a whole or not at all."
            got = f"{role} for {weight.name}, and replicate for {whole[weight.region]} of its region"
        raise ValueError(
            message(
                rule,
                got=got,
                source=OWNER[source],
                change="name both ends, or leave the pattern out: a region of which one layer is replicated is whole",
            )
        )


def _entries(decisions: Iterable[_Decision], regions: Mapping[int, TensorRegion]) -> list[TensorPlanEntry]:
    """Returns one entry for all weights whose collapsed names and decisions are the same."""
    grouped: dict[tuple[object, ...], TensorPlanEntry] = {}
    for decision in decisions:
        region = regions.get(decision.weight.region) if decision.weight.region is not None else None
        heads = _heads(region) if region is not None and decision.role != "replicate" else ""
        pattern = collapsed(decision.weight.name)
        note = collapsed(decision.note)
        key = pattern, decision.role, decision.source, decision.parts, heads, note
        entry = grouped.get(key) or TensorPlanEntry(
            pattern=pattern, role=decision.role, source=decision.source, names=(), parts=decision.parts, heads=heads,
            note=note,
        )  # fmt: skip
        grouped[key] = replace(entry, names=(*entry.names, decision.weight.name))
    entries = list(grouped.values())
    patterns = [entry.pattern for entry in entries]
    # Blocks that differ under one pattern are told by their own names.
    return [
        entry if patterns.count(entry.pattern) == 1 or len(entry.names) > 1 else replace(entry, pattern=entry.names[0])
        for entry in entries
    ]


def _heads(region: TensorRegion) -> str:
    if region.query_heads is None:
        return ""
    return f"{region.query_heads} query, {region.key_value_heads} key-value"


def _fit(region: TensorRegion, size: int) -> RegionFit:
    """Returns how the region falls on the ranks: whole units, and where they are too few, whole query heads."""
    units, copies = region.units, 1
    heads = region.query_heads
    if heads is not None and units < size and heads > units:
        copies = -(-size // units)
        units = heads
    return RegionFit(
        pattern=", ".join(dict.fromkeys(collapsed(name) for name in region.closers)),
        units=region.units,
        query_heads=heads,
        key_value_heads=region.key_value_heads,
        is_even=units % size == 0 and (copies == 1 or size % region.units == 0),
        key_value_copies=copies,
        shards=tuple(units // size + (rank < units % size) for rank in range(size)),
    )


def _notes(fits: Iterable[RegionFit], decisions: Iterable[_Decision], roles: TensorRoles, size: int) -> Iterable[str]:
    for fit in dict.fromkeys(fits):
        if min(fit.shards) == 0:
            yield f"{fit.pattern}: {sum(fit.shards)} unit(s) for {size} ranks, so some ranks would hold none"
        elif not fit.is_even:
            yield f"{fit.pattern}: uneven, {_spread(fit.shards)} per rank"
        if fit.key_value_copies > 1:
            yield (
                f"{fit.pattern}: {fit.units} key-value head(s) for {size} ranks, each held by {fit.key_value_copies} of"
                " them"
            )
    uneven = {d.weight.shape[d.weight.dim or 0] for d in decisions if d.role == "vocab"}
    for length in sorted(length for length in uneven if length % size):
        yield f"vocabulary of {length}: uneven over {size} ranks"
    alone = [d for d in decisions if d.role in _INSIDE and d.weight.region is None]
    for name in dict.fromkeys(collapsed(d.weight.name) for d in alone):
        yield f"{name}: taken at the word given for it; the probe does not reach it, verify='full' does"
    for name, module in roles.unknown_functions:
        yield (
            f"{name} in {module or roles.module_class} has no rule for shares, so what it meets is whole: "
            "leave it so, write it with functions of torch that have one, or name the layers around it in "
            "TensorOptions(plan=...) and let verify='full' try them"
        )


def _spread(shards: Sequence[int]) -> str:
    return f"{max(shards)} to {min(shards)}" if len(shards) > 4 else ", ".join(map(str, shards))


def format_tensor_plan(plan: TensorPlan) -> str:
    """Returns the plan as a table."""
    rows = [("weight", "role", "from", "count", "parts", "heads", "why")]
    for entry in plan.entries:
        parts = " + ".join(map(str, entry.parts)) if len(entry.parts) > 1 else ""
        rows.append((entry.pattern, entry.role, entry.source, f"{len(entry.names)} x", parts, entry.heads, entry.note))
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = [f"Tensor-parallel plan for {plan.module_class} on {plan.size} rank(s)"]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"  note: {note}" for note in plan.notes)])
