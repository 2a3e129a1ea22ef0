"""What the race found, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.data_parallel import ratio, table
from benchmarks.peer_programs.lines import lines_to_write
from benchmarks.peer_programs.table import OURS, PROCESSES, PROGRAMS

LOSS_TOLERANCE = 1e-5
BUSY = 3.0
"""Load above which a report says that the machine was busy."""
TITLES = {"fsdp_tp": "fsdp x tp", "fsdp_pp": "fsdp x pp"}
NOT_OFFERED = {
    ("lightning", "pp"): "none",
    ("accelerate", "tp"): "by transformers",
    ("accelerate", "pp"): "inference only",
    ("transformers", "pp"): "forward only",
}
"""What a library has no way to train; an empty cell is a way that was not tried."""
TRIED = {
    "deepspeed 0.19.8": "installs and imports; on CPU processes its start compiles a C++ extension, which did not end "
    "within 200 s on a busy machine; not tried further",
    "colossalai 0.5.0": "asks for torch 2.5.1 or older; not tried further",
    "mosaicml (Composer) 0.32.1": "asks for torch older than 2.7.1; not tried further",
    "torchtitan 0.3.0": "a program that trains its own model definitions, not a library for a user's module; its "
    "import wants packages that have nothing to do with parallelism (tyro first); not tried further",
    "accelerate's FSDP2": "drops `fsdp_plugin` in silence on CPU processes and trains as ddp; measured here with its "
    "state told to take them (three lines that are not counted)",
}
INSTALL = "pip install --no-deps --target build/peers accelerate psutil"


def report(races: list[dict[str, Any]], excluded: dict[str, str], facts: dict[str, Any], command: str) -> str:
    """Returns the results as Markdown."""
    shape, rounds = races[0]["shape"], races[0]["rounds"]
    load = max(facts["load at the start"], facts["load at the end"])
    busy = f"**Taken on a busy machine (load {load} on {facts['cores']} cores): times are not final.**"
    lines = [
        "# Peers: one training by many libraries",
        "",
        f"`{command}`. A Llama of transformers with {races[0]['parameters']:,} parameters (width {shape['width']}, "
        f"{shape['blocks']} blocks, {shape['vocabulary']} words), {shape['rows']} rows of {shape['length']} tokens a "
        f"step over all ranks; AdamW, fp32; {rounds} counted steps of each program, interleaved in one run. gloo on "
        "the host, one thread per process.",
        "",
        ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        *(["", busy] if load > BUSY else []),
        "",
        f"Libraries beside the project's own environment: `{INSTALL}`, then `PYTHONPATH=build/peers` before the "
        "command.",
        "",
        "## Lines that a user writes or changes",
        "",
        "Against the same program for one process: a loop in torch for torch, transformers and accelerate; "
        "a LightningModule and a Trainer for Lightning and ours. The program counts them from the code that it runs "
        "(`benchmarks/peer_programs`), imports and the arguments of the Trainer included; lines of code as the "
        "formatter leaves them.",
        "",
        *table(("by", *(TITLES.get(layout, layout) for layout in PROCESSES)), _lines()),
        "",
        "## Time",
        "",
        "Seconds of a step of the slowest rank, median. Ratios: ours / this in the same round, median over rounds "
        "[95 % interval]; the ratio of processor time (all ranks together) leaves waiting out.",
        "",
        *table(("processes", "layout", "by", "s/step", "ours / this", "CPU, ours / this"), _times(races)),
        "",
        "## Traffic and memory of a step",
        "",
        "Collectives of rank 0, bytes of the whole tensors; for a pipeline also what crosses cuts. Other messages: "
        "agreements of ranks and of the Trainer. State: parameters, gradients and Adam's moments that are alive on the "
        "rank that holds most. Working memory: the most bytes, taken from the allocator within one step, that were "
        "held at once: activations, new gradients, gathered parameters and buffers, on the rank that takes most.",
        "",
        *table(
            ("layout", "by", "collectives", "bytes", "other messages", "state", "share", "working memory"),
            _traffic(races),
        ),
        "",
        "## The same training",
        "",
        "Largest relative difference of a loss, mean over data ranks, from the same step in one process:",
        "",
        *table(("layout", "by", "difference", "equal"), _losses(races)),
        "",
        "## Left out",
        "",
        *(f"- {name}: {why}" for name, why in (excluded | TRIED).items()),
        "",
    ]
    return "\n".join(lines)


def loss_error(race: dict[str, Any], name: str) -> float:
    """Returns the largest relative difference of a program's losses from those of one process."""
    pairs = zip(race["programs"][name]["losses"], race["one process"]["losses"], strict=True)
    return max(abs(found - right) / abs(right) for found, right in pairs)


def _lines() -> Iterator[tuple[object, ...]]:
    for by in dict.fromkeys(program.by for program in PROGRAMS):
        cells = []
        for layout in PROCESSES:
            known = NOT_OFFERED.get((by, layout))
            program = next((one for one in PROGRAMS if (one.by, one.layout) == (by, layout)), None)
            if known or program is None:
                cells.append(known or "")
            elif program.missing:
                cells.append("not installed")
            else:
                cells.append(str(len(lines_to_write(program.load(), program.one_process()))))
        yield by, *cells


def _programs(races: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for race in races:
        order = list(PROCESSES)
        yield from (
            (race, one) for one in sorted(race["programs"].values(), key=lambda one: order.index(one["layout"]))
        )


def _title(program: dict[str, Any]) -> str:
    return TITLES.get(program["layout"], program["layout"])


def _times(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, program in _programs(races):
        ours = race["programs"].get(f"{program['layout']}, {OURS}")
        seconds = f"{statistics.median(program['seconds']):.3f}"
        cells = ["", ""]
        if ours is not None and ours is not program:
            found = [ratio(ours[clock], program[clock]) for clock in ("seconds", "cpu_seconds")]
            cells = [f"{r.median:.3f} [{r.low:.3f}, {r.high:.3f}]" for r in found]
        yield race["processes"], _title(program), program["by"], seconds, *cells


def _traffic(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, program in _programs(races):
        data = [row for row in program["traffic"] if row["plane"] != "control"]
        other = [row for row in program["traffic"] if row["plane"] == "control"]
        kinds = "; ".join(f"{row['count']} {row['kind']} over {row['over']}" for row in data)
        nbytes, messages = (sum(row["bytes"] for row in data), sum(row["count"] for row in other))
        state = program["state"]["total"]
        share = state / race["one process"]["state"]
        growth = f"{program['growth']:,}"
        yield _title(program), program["by"], kinds, f"{nbytes:,}", messages, f"{state:,}", f"{share:.3f}", growth


def _losses(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, program in _programs(races):
        error = loss_error(race, f"{program['layout']}, {program['by']}")
        yield _title(program), program["by"], f"{error:.1e}", "yes" if error <= LOSS_TOLERANCE else "NO"
