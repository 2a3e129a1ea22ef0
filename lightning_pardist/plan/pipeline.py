"""Decides how a block stack is cut into stages, what every stage holds, and into how many parts a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_pardist.plan.pipeline_input import PipelineInput, refusal
from lightning_pardist.plan.pipeline_microbatches import few_microbatches, plan_microbatches
from lightning_pardist.plan.pipeline_split import BlockCosts, block_costs, even_split, given_split, stage_cost
from lightning_pardist.specs.model_profile import ParameterProfile
from lightning_pardist.specs.pipeline_plan import Dataflow, PipelinePlan, StagePlan


def plan_pipeline(given: PipelineInput) -> PipelinePlan:
    """Returns the plan of the pipeline axis.

    Raises:
        ValueError: if the module cannot be cut as asked, naming what stands in the way.
    """
    _check_stack(given)
    costs = block_costs(given.profile)
    rank_of_stage = _stage_ranks(given)
    starts = _starts(given, costs, len(rank_of_stage))
    stages = _stages(given, costs, starts, rank_of_stage)
    microbatches, simulation = plan_microbatches(given)
    per_rank = len(stages) // given.ranks
    shares = [stage_cost(costs, s.first, s.stop) for s in stages]
    return PipelinePlan(
        schedule=given.options.schedule,
        ranks=given.ranks,
        num_microbatches=microbatches,
        blocks=given.dataflow.blocks,
        stages=stages,
        idle_blocks=tuple(block.name for block in given.profile.blocks() if not block.calls),
        shared_parameters=_shared(given, stages),
        foreign_buffers=_foreign_buffers(given, stages),
        rewritten=given.dataflow.rewritten,
        draws_random=given.dataflow.draws_random,
        idle_share=round(simulation.idle_share, 6),
        alive=simulation.most_alive(per_rank),
        balance=round(max(shares) * len(shares) / max(sum(shares), 1), 4),
        timeline=simulation.lines(),
        notes=_notes(given, stages, microbatches, simulation.idle_share),
    )


# ---- what cannot be cut


def _check_stack(given: PipelineInput) -> None:
    blocks, flow = given.dataflow.blocks, given.dataflow
    stages = given.ranks * given.options.virtual_stages
    if len(blocks) < stages and given.schedules.custom is None:
        raise refusal(
            "Every stage of a pipeline needs at least one block of a stack.",
            got=f"{len(blocks)} block(s) for {stages} stage(s)"
            + (f": {', '.join(blocks)}" if blocks else f"; {given.profile.module_class} has no stack of like blocks"),
            change=f"use pipeline_parallel_size <= {max(len(blocks) // given.options.virtual_stages, 1)}, or put the "
            "layers into an nn.ModuleList or nn.Sequential of blocks that are called one after another",
        )
    for name, calls in zip(blocks, flow.calls):
        if calls != 1:
            raise refusal(
                "Every block must be called exactly once in a step, for its stage runs it once per micro-batch.",
                got=f"{name} was called {calls} times",
                change="call it once, or use data or tensor parallelism for this module",
            )
    for name, kind in zip(blocks[:-1], flow.opaque[:-1]):
        if kind is not None:
            raise refusal(
                "Blocks must return tensors and plain values, in any nesting of containers: only those can be sent.",
                got=f"{name} returns a {kind}",
                change="return its tensors instead",
            )


def _what_forbids(flow: Dataflow, cut: int) -> tuple[int, int] | None:
    """Returns the (block, target) whose hidden dependence forbids a cut before block ``cut``; None if it is fine."""
    for target in range(cut, len(flow.blocks) + 1):
        for block in flow.needs[target].insides:
            if block < cut:
                return block, target
    return None


def _starts(given: PipelineInput, costs: BlockCosts, stages: int) -> tuple[int, ...]:
    flow, split = given.dataflow, given.options.split
    blocked = {cut: why for cut in range(1, len(flow.blocks)) if (why := _what_forbids(flow, cut))}
    if split != "auto":
        starts = given_split(split, flow.blocks, stages)
        for cut in starts[1:]:
            if cut in blocked:
                raise _hidden(flow, cut, *blocked[cut])
        return starts
    found = even_split(costs, stages, frozenset(blocked))
    if found is None:
        cut = min(blocked)
        raise _hidden(flow, cut, *blocked[cut])
    return found


def _hidden(flow: Dataflow, cut: int, block: int, target: int) -> ValueError:
    reader = flow.blocks[target] if target < len(flow.blocks) else "the code after the last block"
    return refusal(
        "What crosses a cut between stages must be an output of a block, or be computed outside of blocks.",
        got=f"{reader} reads a tensor made inside {flow.blocks[block]} that this block does not return (kept on an "
        f"attribute or in a cache, say), so there can be no cut before {flow.blocks[cut]}",
        change="return that tensor from the block, or choose a split that keeps the two on one stage",
    )


# ---- stages


def _stage_ranks(given: PipelineInput) -> tuple[int, ...]:
    custom = given.schedules.custom
    if custom is not None:
        owner = {stage: rank for rank, actions in custom.items() for stage, _, _ in actions}
        if len(custom) != given.ranks or sorted(owner) != list(range(len(owner))):
            raise refusal(
                "A schedule file has one row per rank of the pipeline and names stages 0, 1, 2, ... without a gap.",
                got=f"{len(custom)} row(s) with stages {sorted(owner)} for {given.ranks} rank(s)",
                source=given.options.schedule,
                change="write the file for this number of ranks",
            )
        if len({sum(1 for r in owner.values() if r == rank) for rank in custom}) != 1:
            raise refusal(
                "All ranks of a pipeline must have equally many stages.",
                got=f"stage -> rank: {owner}",
                source=given.options.schedule,
                change="give every rank as many stages as the others",
            )
        return tuple(owner[stage] for stage in range(len(owner)))
    count = given.ranks * given.options.virtual_stages
    return tuple(given.schedules.rank_of_stage(given.options.schedule, s, given.ranks) for s in range(count))


def _stages(
    given: PipelineInput, costs: BlockCosts, starts: Sequence[int], ranks: Sequence[int]
) -> tuple[StagePlan, ...]:
    flow = given.dataflow
    bounds = [*starts, len(flow.blocks)]
    by_name = {p.name: p for p in given.profile.parameters}
    wanted = [set(_needed(given, first, stop)) for first, stop in pairwise(bounds)]
    _give_homes(given, bounds, wanted)
    found = []
    for index, (first, stop) in enumerate(pairwise(bounds)):
        names = tuple(name for name in by_name if name in wanted[index])
        is_last = index == len(ranks) - 1
        found.append(
            StagePlan(
                index=index,
                rank=ranks[index],
                first=first,
                stop=stop,
                blocks=flow.blocks[first:stop],
                parameters=names,
                receives=flow.crossing(first) if index else (),
                sends=() if is_last else flow.crossing(stop),
                flops=stage_cost(costs, first, stop),
                parameter_bytes=sum(by_name[name].nbytes for name in names),
                activation_bytes=sum(costs.activation_bytes[first:stop])
                + (costs.before_bytes if index == 0 else 0)
                + (costs.after_bytes if is_last else 0),
            )
        )
    return tuple(found)


def _needed(given: PipelineInput, first: int, stop: int) -> tuple[str, ...]:
    own = [n for block in given.dataflow.blocks[first:stop] for n in given.table.parameters_below(block)]
    return (*given.dataflow.needed_by(first, stop), *own)


def _give_homes(given: PipelineInput, bounds: Sequence[int], wanted: list[set[str]]) -> None:
    """Gives parameters that the step never uses to the first stage, so that every one is stored somewhere."""
    homeless = {p.name for p in given.profile.parameters} - set().union(*wanted)
    wanted[0] |= homeless


def _shared(given: PipelineInput, stages: Sequence[StagePlan]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = []
    for parameter in given.profile.parameters:
        ranks = tuple(sorted({stage.rank for stage in stages if parameter.name in stage.parameters}))
        if len(ranks) > 1:
            found.append((parameter.name, ranks))
    return tuple(found)


def _foreign_buffers(given: PipelineInput, stages: Sequence[StagePlan]) -> tuple[tuple[str, int], ...]:
    """Buffers that a step writes are kept up to date by one rank: that of the block, or of the code after it."""
    count = len(given.dataflow.blocks)
    found = []
    for name, target in given.dataflow.written_buffers:
        stage = next(s for s in stages if s.first <= min(target, count - 1) < s.stop)
        found.append((name, stage.rank))
    return tuple(found)


# ---- words


def _notes(given: PipelineInput, stages: Sequence[StagePlan], microbatches: int, idle_share: float) -> tuple[str, ...]:
    by_name = {p.name: p for p in given.profile.parameters}
    notes = []
    for name, ranks in _shared(given, stages):
        notes.append(f"{name} lives on pipeline ranks {', '.join(map(str, ranks))}: {_why(by_name[name])}")
    idle = [block.name for block in given.profile.blocks() if not block.calls]
    if idle:
        notes.append(f"the step does not call {', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}")
    if len(notes) > 6:
        notes = [*notes[:5], f"and {len(notes) - 5} more parameters live on several ranks"]
    if microbatches < given.ranks:
        notes.append(few_microbatches(microbatches, given.ranks, idle_share))
    if given.profile.batch_rows is None:
        notes.append("the size of a batch is not known, so the number of micro-batches is a guess")
    return tuple(notes)


def _why(parameter: ParameterProfile) -> str:
    if parameter.is_tied:
        return "tied, its gradients are summed"
    return "what is made of it is made again where it is needed, its gradients are summed"
