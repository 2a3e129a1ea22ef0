"""From roles to what each rank of the tensor axis holds of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_pardist.base.errors import message
from lightning_pardist.specs.tensor_plan import RegionShare, TensorLayout
from lightning_pardist.specs.tensor_roles import TensorRegion, TensorRole, TensorRoles, WeightRole


def too_few_units(regions: Iterable[TensorRegion], size: int) -> dict[int, str]:
    """Returns the regions without heads that have fewer units than there are ranks, with what to say of them."""
    return {
        region.index: f"it has {region.units} unit(s) for {size} ranks"
        for region in regions
        if region.query_heads is None and region.units < size
    }


def with_tied_regions(broken: Mapping[int, str], roles: TensorRoles) -> dict[int, str]:
    """Returns the regions that are left alone, with those that share a whole parameter with one, and why.

    The gradient of such a parameter is a sum over the ranks only if all its uses are on sharded tensors.
    """
    result, before = dict(broken), -1
    while len(result) != before:
        before = len(result)
        for p in roles.partial_parameters:
            if p.is_whole_elsewhere or not result.keys().isdisjoint(p.regions):
                why = f"{p.name}, which it uses whole, is used on whole tensors too"
                result = dict.fromkeys(p.regions, why) | result
    return result


def lay_out(
    roles: TensorRoles, decided: Sequence[tuple[WeightRole, TensorRole]], kept: Sequence[TensorRegion], size: int
) -> dict[str, Any]:
    """Returns the fields of a ``TensorPlan`` that say what every rank holds.

    Args:
        roles: what was derived.
        decided: every weight with its final role.
        kept: the regions that are sharded.
        size: ranks of the tensor axis.

    Raises:
        ValueError: for an attention whose heads cannot be dealt out to so many ranks.
    """
    shares: list[RegionShare | None] = [None] * len(roles.regions)
    for region in kept:
        shares[region.index] = _share(region, size)
    indices = {region.index for region in kept}
    partial = [p.name for p in roles.partial_parameters if indices.issuperset(p.regions)]
    used = {weight.parameter for weight, role in decided if role != "replicate"}
    layouts = [*_of_regions(kept, shares, size), *_of_weights(decided, kept, size)]
    return {
        "layouts": tuple({layout.parameter: layout for layout in layouts}.values()),
        "uses": tuple((weight.parameter, role) for weight, role in decided if role != "replicate"),
        "shares": tuple(shares),
        "calls": tuple(call for call in roles.calls if call.regions <= indices),
        "exchanges": tuple((name, nbytes) for name, nbytes in roles.exchanges if name in used),
        "region_members": roles.region_members,
        "quiet_modules": roles.quiet_modules,
        "partial_parameters": (*partial, *_biases_of_lone_weights(decided, kept)),
    }


def _share(region: TensorRegion, size: int) -> RegionShare:
    units = region.units
    if units >= size:
        each, left = divmod(units, size)
        return RegionShare(units=units, shares=tuple(each + (rank < left) for rank in range(size)))
    heads = region.query_heads or units
    per_unit = heads // units
    copies = size // units
    if size % units or per_unit % copies:
        raise ValueError(
            message(
                "An attention is shared out by heads: every rank needs whole query heads, and key-value heads that are "
                "fewer than the ranks are held by several ranks each, in groups of one size.",
                got=f"{heads} query head(s) and {units} key-value head(s) for tensor_parallel_size={size}, in "
                + ", ".join(region.closers[:2]),
                source="the flow of data through the module, and the strategy's tensor_parallel_size",
                change=f"use a tensor_parallel_size that divides {heads} and is a multiple or a divisor of {units}, or "
                f"keep it whole with TensorOptions(plan={{'{region.closers[0]}': 'replicate'}})",
            )
        )
    return RegionShare(units=units, shares=(1,) * size, copies=copies)


def _of_regions(
    kept: Iterable[TensorRegion], shares: Sequence[RegionShare | None], size: int
) -> Iterator[TensorLayout]:
    for region in kept:
        share = shares[region.index]
        assert share is not None
        for parameter in region.parameters:
            yield TensorLayout(
                parameter=parameter.name,
                dim=parameter.dim,
                length=sum(length for length, _ in parameter.terms),
                stretches=tuple(share.stretches(parameter.terms, rank) for rank in range(size)),
            )


def _of_weights(
    decided: Iterable[tuple[WeightRole, TensorRole]], kept: Iterable[TensorRegion], size: int
) -> Iterator[TensorLayout]:
    """Yields the layouts of weights over the vocabulary, and of those that the user has named himself."""
    known = {parameter.name for region in kept for parameter in region.parameters}
    for weight, role in decided:
        if role == "replicate" or weight.parameter in known:
            continue
        dim = weight.dim if weight.dim is not None and role == weight.role else 1 if role == "row" else 0
        length = weight.shape[dim]
        part = -(-length // size)
        yield TensorLayout(
            parameter=weight.parameter,
            dim=dim,
            length=length,
            stretches=tuple(_chunk(length, part, rank) for rank in range(size)),
        )


def _chunk(length: int, part: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Returns the stretch of a rank as ``torch.chunk`` deals it."""
    start, end = min(rank * part, length), min((rank + 1) * part, length)
    return ((start, end - start),) if end > start else ()


def local_shapes(
    shapes: Mapping[str, tuple[int, ...]], layouts: Iterable[TensorLayout], rank: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters on one rank of the tensor axis."""
    result = dict(shapes)
    for layout in layouts:
        shape = list(result[layout.parameter])
        shape[layout.dim] = layout.local_length(rank)
        result[layout.parameter] = tuple(shape)
    return result


def _biases_of_lone_weights(
    decided: Iterable[tuple[WeightRole, TensorRole]], kept: Iterable[TensorRegion]
) -> list[str]:
    """Returns the whole biases of column weights outside regions: a rank uses its part only."""
    known = {parameter.name for region in kept for parameter in region.parameters}
    lone = [w for w, role in decided if role in ("column", "vocab") and w.parameter not in known]
    return list(dict.fromkeys(name for weight in lone for name in weight.biases if name not in known))
