"""The benchmark against other libraries: its count of lines, and one small race."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist
from torch.optim import SGD, Adam

from benchmarks.peer_programs.lines import lines_to_write
from benchmarks.peer_programs.report import LOSS_TOLERANCE, loss_error
from tests.support.marks import transformers_or_skip


def before(rate: float) -> Any:
    print(rate)
    rate = abs(rate)
    optimizer = SGD([], lr=rate)
    return optimizer


def half(rate: float) -> float:
    """Not counted: a docstring."""
    # Not counted: a comment.
    return rate / 2


def after(rate: float) -> Any:
    rate = abs(rate)

    optimizer = Adam([], lr=half(rate))
    optimizer.watched = True  # not counted
    return optimizer


def test_lines_are_those_of_the_program_its_helpers_and_its_imports() -> None:
    assert lines_to_write(after, before) == [
        "from torch.optim import Adam",
        "def half(rate: float) -> float:",
        "    return rate / 2",
        "-    print(rate)",
        "    optimizer = Adam([], lr=half(rate))",
    ]


def test_ours_is_one_changed_line() -> None:
    transformers_or_skip()
    from benchmarks.peer_programs import by_lightning

    for layout in ("ddp", "fsdp", "tp", "pp"):
        program = getattr(by_lightning, f"ours_{layout}")
        assert len(lines_to_write(program, by_lightning.one_process)) == 1


def small_race(names: list[str]) -> dict[str, Any]:
    from benchmarks.peer_programs.race import race
    from benchmarks.peer_programs.table import named
    from benchmarks.peer_programs.task import Shape

    shape = Shape(vocabulary=32, length=8, width=16, blocks=2, heads=2, rows=4)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        shape.build().save_pretrained(folders[0])
        dist.barrier()
        found = race(named(names), shape, 1, folders[0])
        dist.barrier()  # nobody reads the folder any more
    return found


def test_a_small_race_has_the_losses_of_one_process(run_distributed: Any) -> None:
    transformers_or_skip()
    names = ["fsdp, torch", "fsdp, ours"]
    found = run_distributed(small_race, names, world_size=2)[0]
    for name in names:
        assert loss_error(found, name) <= LOSS_TOLERANCE
        assert found["programs"][name]["state"]["total"] == found["one process"]["state"] / 2
    assert found["programs"][names[0]]["traffic"] == [
        row for row in found["programs"][names[1]]["traffic"] if row["plane"] != "control"
    ]
