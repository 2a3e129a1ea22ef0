"""Which stacks can be sharded over the sequence between their regions, and what that makes of a tensor plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_pardist.base.errors import message
from lightning_pardist.base.words import common_module
from lightning_pardist.plan.tensor_words import matches
from lightning_pardist.specs.model_profile import ModelProfile, StackProfile
from lightning_pardist.specs.tensor_plan import SequenceStack, TensorPlan
from lightning_pardist.specs.tensor_words import OWNER, SequenceWord


def with_sequence_parallel(
    plan: TensorPlan, profile: ModelProfile, words: Sequence[SequenceWord] = (), *, everywhere: bool = True
) -> TensorPlan:
    """Returns the plan with what lies between the regions of stacks sharded over the sequence.

    Args:
        plan: of the regions.
        profile: of the module.
        words: modules that the user wants to work on shares of the sequence. The whole stack around one does.
        everywhere: every stack, whether named or not.

    Raises:
        ValueError: if there is no stack whose blocks pass on one hidden state of rows, positions and features, or a
            word names something else than a module between the regions of one.
    """
    stacks = tuple(_stacks(profile))
    if not stacks:
        raise ValueError(
            message(
                "Sequence parallel needs a stack of blocks that pass on one hidden state (rows, positions, features).",
                got=profile.fallback_reason or f"{profile.module_class} has none",
                source="the described step of the module",
                change="use TensorOptions(sequence_parallel=False)",
            )
        )
    stacks = tuple(replace(stack, around_regions=tuple(_around(stack, plan))) for stack in stacks)
    named = [stack for word in words for stack in _named(word, stacks, profile)]
    stacks = stacks if everywhere else tuple(stack for stack in stacks if stack in named)
    blocks = {name for stack in stacks for name in stack.blocks}
    sharded = {layout.parameter for layout in plan.layouts}
    inside = [
        p.name for p in profile.parameters if p.name not in sharded and any(_is_in(p.name, block) for block in blocks)
    ]
    partial = dict.fromkeys([*plan.partial_parameters, *inside])
    notes = [f"{word.pattern}: on shares of the sequence, as {OWNER[word.source]} says" for word in words]
    return replace(plan, sequence_stacks=stacks, partial_parameters=tuple(partial), notes=(*plan.notes, *notes))


def _named(word: SequenceWord, stacks: Sequence[SequenceStack], profile: ModelProfile) -> Iterator[SequenceStack]:
    """Yields the stacks whose modules between regions a word names."""
    names = [name for name in profile.called_modules or () if matches(word.pattern, name)]
    if not names:
        raise _refusal(word, f"{word.pattern!r}, which matches no module that the step calls")
    for name in names:
        stack = next((s for s in stacks if any(name == block or _is_in(name, block) for block in s.blocks)), None)
        if stack is None:
            raise _refusal(word, f"{name}, which is outside every stack, where each rank has all positions")
        around = next((a for a in stack.around_regions if name == a or _is_in(name, a)), None)
        if around is not None:
            raise _refusal(word, f"{name}, which is inside the region of {around}, where each rank has all positions")
        if word.dim is not None and word.dim != stack.dim:
            raise _refusal(word, f"{name} with sequence_dim={word.dim}; its positions are in dim {stack.dim}")
        yield stack


def _refusal(word: SequenceWord, got: str) -> ValueError:
    return ValueError(
        message(
            "The word sequence is for modules between the regions of a stack of blocks: norms, dropout, or a block.",
            got=got,
            source=OWNER[word.source],
            change="leave the pattern out; TensorOptions(sequence_parallel=True) finds these modules by itself",
        )
    )


def _around(stack: SequenceStack, plan: TensorPlan) -> Iterator[str]:
    """Yields the modules around regions, block by block: a region may reach over several (a shared position bias)."""
    for members, share in zip(plan.region_members, plan.shares):
        for block in stack.blocks:
            around = common_module(name for name in members if _is_in(name, block))
            if share is not None and _is_in(around, block):  # else the layers themselves see to it
                yield around


def _is_in(name: str, block: str) -> bool:
    return name.startswith(block + ".")


def _stacks(profile: ModelProfile) -> Iterator[SequenceStack]:
    for stack in profile.stacks:
        found = _sequence_stack(stack, profile.batch_rows)
        if found is not None:
            yield found


def _sequence_stack(stack: StackProfile, rows: int | None) -> SequenceStack | None:
    names: set[str] = set()
    for block in stack.blocks:
        if block.calls != 1 or not block.inputs or not block.outputs:
            return None
        hidden, out = block.inputs[0], block.outputs[0]
        if len(hidden.shape) != 3 or hidden.shape != out.shape or not hidden.dtype.is_floating_point:
            return None
        names.add(hidden.name)
    if len(names) != 1 or not stack.blocks:
        return None
    shape = stack.blocks[0].inputs[0].shape
    dim = 0 if rows is not None and shape[0] != rows and shape[1] == rows else 1
    return SequenceStack(blocks=tuple(block.name for block in stack.blocks), hidden=names.pop(), dim=dim)
