"""The words of a tensor-parallel plan: which there are, what they match, and torch's styles as such words.

torch's styles move activations between layouts, one module at a time. Here regions see to that, so a style is accepted
where its layouts are those that a region gives anyway, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, cast

from lightning_pardist.base.errors import message
from lightning_pardist.specs.tensor_roles import ROLES, TensorRole
from lightning_pardist.specs.tensor_words import OWNER, SEQUENCE, Given, SequenceWord, Source, StyleWord

Plans = Mapping[Source, Mapping[str, Given] | None]


def weight_words(plans: Plans) -> Iterator[tuple[str, Given, Source]]:
    """Yields (pattern, word or style, source) of everything that is about weights.

    Raises:
        ValueError: for an unknown word.
    """
    for source, plan in plans.items():
        for pattern, given in (plan or {}).items():
            if isinstance(given, str) and given not in (*ROLES, SEQUENCE):
                raise ValueError(
                    message(
                        f"A tensor-parallel plan gives each pattern one of the words {', '.join(ROLES)}, {SEQUENCE}.",
                        got=f"{pattern!r}: {given!r}",
                        source=OWNER[source],
                        change="use one of these words",
                    )
                )
            if not _is_about_sequence(given):
                yield pattern, given, source


def sequence_words(plans: Plans) -> tuple[SequenceWord, ...]:
    """Returns everything that is about modules on shares of the sequence."""
    return tuple(
        SequenceWord(pattern, source, given.dim if isinstance(given, StyleWord) else None)
        for source, plan in plans.items()
        for pattern, given in (plan or {}).items()
        if _is_about_sequence(given)
    )


def check_positions(plans: Plans, *, is_sharded: bool) -> None:
    """Refuses styles that get or give parts of the sequence where it is not sharded.

    Raises:
        ValueError: naming the pattern.
    """
    for source, plan in plans.items():
        for pattern, given in (plan or {}).items():
            if isinstance(given, StyleWord) and "positions" in (given.into, given.out) and not is_sharded:
                raise ValueError(
                    message(
                        "A style that gets or gives parts of the sequence needs sequence parallel.",
                        got=f"{pattern!r}: {given.text}",
                        source=OWNER[source],
                        change="set TensorOptions(sequence_parallel=True), or use the style without Shard(1)",
                    )
                )


def matches(pattern: str, name: str) -> bool:
    """Returns whether a name has as many parts as the pattern, each of which fits."""
    parts, given = pattern.split("."), name.split(".")
    return len(parts) == len(given) and all(fnmatchcase(value, part) for part, value in zip(parts, given))


def word_of(pattern: str, given: Given, kind: Literal["linear", "embedding"], source: Source) -> TensorRole:
    """Returns the word for a weight.

    Args:
        pattern: for messages.
        given: a word, or a style of torch.
        kind: of the weight.
        source: for messages.

    Raises:
        ValueError: for a style whose layouts no region gives.
    """
    if isinstance(given, str):
        return cast(TensorRole, given)
    takes_whole, gives_whole = given.into in ("whole", "positions"), given.out in ("whole", "positions")
    if given.kind == "column" and kind == "linear" and takes_whole and given.out == "features":
        return "column"
    if given.kind == "column" and kind == "linear" and takes_whole and given.out == "whole":
        return "vocab"  # its output is gathered where somebody looks at it
    if given.kind == "row" and kind == "linear" and given.into == "features" and gives_whole:
        return "row"
    if given.kind == "row" and kind == "embedding" and given.into == "whole" and gives_whole:
        return "vocab"
    raise ValueError(
        message(
            "A style of torch is accepted where its layouts are those of a region: ColwiseParallel() and "
            "RowwiseParallel() for linear layers, ColwiseParallel(output_layouts=Replicate()) for a head, "
            "RowwiseParallel(input_layouts=Replicate()) for an embedding, with Shard(1) for the sequence.",
            got=f"{pattern!r}: {given.text} for {'a linear layer' if kind == 'linear' else 'an embedding'}",
            source=OWNER[source],
            change=f"use one of these, or one of the words {', '.join(ROLES)}",
        )
    )


def _is_about_sequence(given: Given) -> bool:
    return given == SEQUENCE if isinstance(given, str) else given.kind == "sequence"
