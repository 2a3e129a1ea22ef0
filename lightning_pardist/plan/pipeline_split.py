"""Cuts a row of blocks into stages so that the dearest stage is as cheap as can be.

Code before the first block counts for the first stage, code after the last block for the last one: a heavy head takes
blocks away from its stage. Among equal costs the split with the smallest largest activation memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lightning_pardist.base.errors import message
from lightning_pardist.specs.model_profile import ModelProfile, PhaseCost


@dataclass(frozen=True)
class BlockCosts:
    """FLOPs forward and backward, and bytes kept between the two."""

    flops: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    before: int
    after: int
    before_bytes: int
    after_bytes: int


def block_costs(profile: ModelProfile) -> BlockCosts:
    """Returns what blocks and the code around them cost; numbers of elements, where a step has no matrix products."""
    blocks = profile.called_blocks()
    flops = [_flops(block.cost) for block in blocks]
    if not any(flops):
        sizes = {p.name: p.numel for p in profile.parameters}
        flops = [1 + sum(sizes[name] for name in block.parameter_names) for block in blocks]
    return BlockCosts(
        flops=tuple(flops),
        activation_bytes=tuple(block.cost.saved_activation_bytes for block in blocks),
        before=_flops(profile.prefix),
        after=_flops(profile.suffix),
        before_bytes=profile.prefix.saved_activation_bytes,
        after_bytes=profile.suffix.saved_activation_bytes,
    )


def stage_cost(costs: BlockCosts, first: int, stop: int) -> int:
    """Returns what a stage of the blocks ``first .. stop - 1`` costs."""
    before = costs.before if first == 0 else 0
    return before + sum(costs.flops[first:stop]) + (costs.after if stop == len(costs.flops) else 0)


def even_split(costs: BlockCosts, stages: int, forbidden: frozenset[int] = frozenset()) -> tuple[int, ...] | None:
    """Returns the first block of every stage; None if the forbidden cuts leave no way.

    Args:
        costs: by block.
        stages: how many.
        forbidden: blocks that no stage may begin with.
    """
    count = len(costs.flops)
    sums = [0, *accumulate(costs.flops)]
    kept = [0, *accumulate(costs.activation_bytes)]

    def price(first: int, stop: int) -> tuple[int, int]:
        flops, nbytes = sums[stop] - sums[first], kept[stop] - kept[first]
        if first == 0:
            flops, nbytes = flops + costs.before, nbytes + costs.before_bytes
        if stop == count:
            flops, nbytes = flops + costs.after, nbytes + costs.after_bytes
        return flops, nbytes

    # best[stop]: (dearest stage, most bytes, sum of squares) and the starts of the stages so far
    best: dict[int, tuple[tuple[int, int, int], tuple[int, ...]]] = {0: ((0, 0, 0), ())}
    for stage in range(stages):
        found: dict[int, tuple[tuple[int, int, int], tuple[int, ...]]] = {}
        stops = [count] if stage == stages - 1 else range(stage + 1, count - (stages - stage - 1) + 1)
        for stop in stops:
            if stop < count and stop in forbidden:
                continue
            for first, ((dearest, most, squares), starts) in best.items():
                if first >= stop:
                    continue
                flops, nbytes = price(first, stop)
                rank = (max(dearest, flops), max(most, nbytes), squares + flops * flops)
                if stop not in found or rank < found[stop][0]:
                    found[stop] = rank, (*starts, first)
        best = found
    return best[count][1] if count in best else None


def given_split(split: Sequence[Any], blocks: Sequence[str], stages: int) -> tuple[int, ...]:
    """Returns the first block of every stage, as the user wants it.

    Raises:
        ValueError: if the split does not fit the blocks.
    """
    if all(isinstance(entry, int) for entry in split):
        if len(split) != stages or sum(split) != len(blocks):
            raise _misfit(
                f"{list(split)}: {len(split)} stage(s) with {sum(split)} block(s)",
                f"give {stages} counts that add up to {len(blocks)}",
            )
        return tuple([0, *accumulate(split)][:-1])
    unknown = [name for name in split if name not in blocks]
    if unknown or len(split) != stages - 1:
        raise _misfit(
            f"{list(split)}" + (f"; {unknown} are no blocks" if unknown else f": {len(split)} name(s)"),
            f"name the {stages - 1} block(s) that stages 1 to {stages - 1} begin with, out of {', '.join(blocks)}",
        )
    starts = (0, *(list(blocks).index(name) for name in split))
    if list(starts) != sorted(set(starts)):
        raise _misfit(f"{list(split)}: not in the order of the calls", f"the order is {', '.join(blocks)}")
    return starts


def _misfit(got: str, change: str) -> ValueError:
    return ValueError(
        message(
            "PipelineOptions.split must share out all blocks over all stages, at least one to each.",
            got=f"split={got}",
            source="the strategy's argument pipeline",
            change=change,
        )
    )


def _flops(cost: PhaseCost) -> int:
    return cost.flops_forward + cost.flops_backward
