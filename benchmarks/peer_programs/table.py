"""Which program trains which layout by which library, and what each is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peer_programs.task import Task

PROCESSES = {"ddp": 2, "fsdp": 2, "tp": 2, "pp": 2, "fsdp_tp": 4, "fsdp_pp": 4}
"""Layout -> processes: two on each axis."""
DATA_RANKS = {"ddp": 2, "fsdp": 2, "fsdp_tp": 2, "fsdp_pp": 2}
"""Layout -> ranks with rows of their own; 1 if not named."""
OURS, LIGHTNING = "ours", "lightning"
_FOLDER = "benchmarks.peer_programs"


@dataclass(frozen=True)
class Program:
    """One way to train."""

    layout: str
    by: str
    module: str
    function: str
    needs: str | None = None
    """Package that the project's own environment may not have."""
    doubtful: bool = False
    """Tried by itself first, so that it cannot take the race down."""
    base: str = "by_torch"
    """Module whose ``one_process`` is the same program without a layout."""

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.by}"

    @property
    def missing(self) -> bool:
        return self.needs is not None and find_spec(self.needs) is None

    def load(self) -> Callable[[Task], None]:
        return getattr(self.source(), self.function)

    def source(self) -> ModuleType:
        return import_module(f"{_FOLDER}.{self.module}")

    def one_process(self) -> Callable[[Task], None]:
        return import_module(f"{_FOLDER}.{self.base}").one_process


def _lightning(layout: str, by: str, function: str) -> Program:
    return Program(layout, by, "by_lightning", function, base="by_lightning")


PROGRAMS = [
    *(Program(layout, "torch", "by_torch", layout) for layout in PROCESSES),
    _lightning("ddp", LIGHTNING, "lightning_ddp"),
    *(_lightning(layout, LIGHTNING, f"lightning_{layout}") for layout in ("fsdp", "tp", "fsdp_tp")),
    *(
        Program(layout, "transformers", "by_transformers", layout, needs="accelerate")
        for layout in ("fsdp", "tp", "fsdp_tp")
    ),
    Program("pp", "transformers", "by_transformers", "pp", needs="accelerate", doubtful=True),
    Program("ddp", "accelerate", "by_accelerate", "ddp", needs="accelerate"),
    Program("fsdp", "accelerate", "by_accelerate", "fsdp", needs="accelerate", doubtful=True),
    *(_lightning(layout, OURS, f"ours_{layout}") for layout in PROCESSES),
]


def named(names: list[str]) -> list[Program]:
    """Returns the programs of these names."""
    return [program for program in PROGRAMS if program.name in names]
