"""Decides which blocks are recomputed and which are compiled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from lightning_pardist.base.errors import message
from lightning_pardist.base.recomputing import EXPENSIVE_OPS, resolve_ops
from lightning_pardist.specs.block_levers import CompileOptions, CompilePlan, RecomputeOptions, RecomputePlan
from lightning_pardist.specs.model_profile import BlockProfile, ModelProfile
from lightning_pardist.specs.parallel_plan import ShardUnit


def plan_recompute(profile: ModelProfile, options: RecomputeOptions | None) -> RecomputePlan:
    """Returns which blocks are recomputed and which operators' results they keep; bytes are not known yet.

    Raises:
        ValueError: if there are no blocks, or a name matches nothing.
    """
    count = sum(1 for _ in profile.blocks())
    if options is None or options.mode == "none":
        return RecomputePlan(num_blocks=count)
    _check_blocks(profile, "recompute", options)
    chosen = [
        block.name
        for stack in profile.stacks
        for block in _matching(stack.blocks, options.blocks)[:: options.every]
    ]  # fmt: skip
    _check_patterns(profile, options.blocks)
    ops: tuple[str, ...] = ()
    if options.mode == "selective":
        found = resolve_ops(options.ops or EXPENSIVE_OPS)
        ops = tuple(dict.fromkeys(sorted(str(each) for overloads in found.values() for each in overloads)))
    return RecomputePlan(mode=options.mode, blocks=tuple(chosen), num_blocks=count, ops=ops)


def with_costs(
    plan: RecomputePlan,
    options: RecomputeOptions,
    *,
    before: ModelProfile,
    after: ModelProfile,
    hits: Collection[str],
) -> RecomputePlan:
    """Returns the plan with the bytes and FLOPs of two profiles.

    Args:
        plan: from ``plan_recompute``.
        options: what the user asked for.
        before: of the step without recomputation.
        after: of the step with it.
        hits: those of ``options.ops`` that some recomputed block ran.

    Raises:
        ValueError: if one of the user's operators ran in no recomputed block.
    """
    for name in options.ops:
        if name not in hits:
            raise ValueError(
                message(
                    "Every entry of RecomputeOptions.ops must be an operator that some recomputed block runs.",
                    got=f"{name!r} matches nothing in {len(plan.blocks)} block(s)",
                    source="RecomputeOptions(ops=...)",
                    change=f"name operators as they reach the device, such as {', '.join(EXPENSIVE_OPS[:3])}; "
                    f"of yours these run: {', '.join(sorted(hits)) or 'none'}",
                )
            )
    return replace(
        plan,
        saved_bytes=after.saved_activation_bytes,
        saved_bytes_without=before.saved_activation_bytes,
        flops_again=after.flops_backward - before.flops_backward,
    )


def plan_compile(profile: ModelProfile, options: CompileOptions | None, units: Sequence[ShardUnit]) -> CompilePlan:
    """Returns which blocks are compiled.

    Raises:
        ValueError: if there are no blocks, or a sharding unit inside one would break its graph.
    """
    if options is None:
        return CompilePlan()
    _check_blocks(profile, "compile", options)
    inside = tuple(f"{block.name}." for block in profile.blocks())
    inner = [name for unit in units for name in unit.modules if name.startswith(inside)]
    if options.fullgraph and inner:
        raise ValueError(
            message(
                "A compiled block is one graph, so no sharding unit may lie inside it.",
                got=f"the unit of {inner[0]}" + (f" and {len(inner) - 1} more" if len(inner) > 1 else ""),
                source="fsdp_units, or batch norms under bf16-mixed, which keep a unit of their own in fp32",
                change="set compile=CompileOptions(fullgraph=False), use whole blocks as units, or precision='32-true'",
            )
        )
    return CompilePlan(blocks=tuple(block.name for block in profile.blocks()), options=options)


def _matching(blocks: Sequence[BlockProfile], patterns: Sequence[str]) -> Sequence[BlockProfile]:
    if not patterns:
        return blocks
    return [block for block in blocks if any(_matches(block, pattern) for pattern in patterns)]


def _matches(block: BlockProfile, pattern: str) -> bool:
    return block.class_name == pattern or fnmatchcase(block.name, pattern)


def _check_patterns(profile: ModelProfile, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(_matches(block, pattern) for block in profile.blocks()):
            classes = sorted({block.class_name for block in profile.blocks()})
            raise ValueError(
                message(
                    "Every entry of RecomputeOptions.blocks must match a block, by class name or by name pattern.",
                    got=f"{pattern!r} matches nothing",
                    source="RecomputeOptions(blocks=...)",
                    change=f"use one of the classes {', '.join(classes)}, or a pattern such as "
                    f"{profile.stacks[0].name + '.*'!r}",
                )
            )


def _check_blocks(profile: ModelProfile, argument: str, options: object) -> None:
    if any(True for _ in profile.blocks()):
        return
    raise ValueError(
        message(
            f"{argument} acts on the blocks of a block stack, and the module has none.",
            got=f"{argument}={options}, {profile.module_class} without a list of like blocks that are called in turn",
            source="the strategy's arguments, and the module",
            change=f"leave {argument} out, or keep the repeated blocks in a ModuleList or Sequential",
        )
    )
