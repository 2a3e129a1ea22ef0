"""Ours against the same layouts by hand in torch, and against Lightning's own strategies: time, traffic, state.

    python benchmarks/data_parallel.py             2 and 4 gloo processes; about nine minutes on two cores
    python benchmarks/data_parallel.py --rounds 5 --dry    a quick look that writes no results

All variants of a world size live in the same processes and take turns, one step each per round, in an order drawn anew
every round (``benchmarks/support/race.py``). What the machine does besides meets all of them alike, and a ratio
compares two steps of the same round. Results go to ``benchmarks/results/data_parallel.{md,json}``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROWS = {2: 4, 4: 2}
"""World size -> chunks per rank: the same global batch."""


class Rival(NamedTuple):
    """What ours is compared with."""

    by: str
    target: float
    """The most that ours may take, as a multiple."""


RIVALS = (Rival("torch", 1.05), Rival("lightning ddp", 1.02), Rival("model parallel", 1.00))


class Compared(NamedTuple):
    """Ours and one rival, in one layout and world size."""

    rival: Rival
    wall: Ratio
    cpu: Ratio


class Ratio(NamedTuple):
    """Ours over a rival, step by step."""

    median: float
    low: float
    """95 % interval of the median, by bootstrap over rounds."""
    high: float


def ratio(ours: Sequence[float], rival: Sequence[float]) -> Ratio:
    """Returns the median over rounds of ours / rival."""
    pairs = [a / b for a, b in zip(ours, rival, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return Ratio(statistics.median(pairs), medians[50], medians[-51])


def run_race(world_size: int, rounds: int) -> dict[str, Any]:
    """Returns what ``benchmarks.support.race`` measured on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "race.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        command += ["-m", "benchmarks.support.race", f"--out={out}", f"--rounds={rounds}", f"--rows={ROWS[world_size]}"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def report(races: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Returns the results as Markdown."""
    size, rounds = races[0]["size"], races[0]["rounds"]
    lines = [
        "# Data parallel: ours against torch by hand and Lightning's strategies",
        "",
        f"Byte-level GPT, {races[0]['parameters']:,} parameters (width {size['width']}, {size['depth']} blocks), "
        f"{size['context']} bytes a row, {ROWS[2] * 2} rows a step over all ranks; AdamW, fp32; {rounds} counted steps "
        "of each variant, interleaved in one run. gloo on the host, one thread per process.",
        "",
        ", ".join(f"{key} {value}" for key, value in environment.items()) + ".",
        "",
        "Written by `make bench`. A step lies between two `on_train_batch_start`: forward, backward, optimizer, "
        "logging, next batch. Its time is that of the slowest rank.",
        "",
        "## Time",
        "",
        "Ratios: ours / other in the same round, median over rounds [95 % interval]; the ratio of processor time (all "
        "ranks together) tells what the code itself costs, waiting and other programs left out. Targets for the wall "
        "time: "
        + ", ".join(f"{rival.by} <= {rival.target:.2f}" for rival in RIVALS)
        + ". Ours and Lightning's log one value per step (ours the mean over ranks, theirs each rank's own); the loop "
        "in torch logs nothing.",
        "",
        *table(
            ("processes", "layout", "by", "s/step", "quartiles", "ours / this", "target", "met", "CPU, ours / this"),
            _times(races),
        ),
        "",
        "## Collectives per step, on real steps",
        "",
        "Bytes of the whole tensors. `plan` says whether count and bytes of every kind and group, and the state bytes "
        "below, are what the plan foretold.",
        "",
        *table(("processes", "layout", "by", "collectives", "plan"), _traffic(races)),
        "",
        "Other messages of a step (agreements and logged values, not counted above):",
        "",
        *table(("by", "message", "count", "bytes"), _control(races)),
        "",
        "## State per rank",
        "",
        "Bytes of live storages after a step, on the rank that holds most: parameters + gradients + Adam's two "
        "moments. 16/d is 16 bytes per parameter over d shards. Adam's step counters (4 bytes per parameter tensor) "
        "are counted apart.",
        "",
        *table(("processes", "layout", "by", "bytes", "16/d", "padding", "counters"), _states(races)),
        "",
        "## The same training",
        "",
        f"Largest relative difference of the mean loss over ranks, any variant, any step: {_spread(races):.1e}.",
        "",
    ]
    return "\n".join(lines)


def _variants(races: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for race in races:
        for variant in race["variants"].values():
            yield race, variant


def _compare(race: dict[str, Any], variant: dict[str, Any]) -> Compared | None:
    rival = next((rival for rival in RIVALS if rival.by == variant["by"]), None)
    if rival is None:
        return None
    ours = race["variants"][f"{variant['layout']}, ours"]
    wall, cpu = (ratio(ours[clock], variant[clock]) for clock in ("seconds", "cpu_seconds"))
    return Compared(rival, wall, cpu)


def _times(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, variant in _variants(races):
        low, median, high = statistics.quantiles(variant["seconds"], n=4)
        row = (race["world_size"], variant["layout"], variant["by"], f"{median:.3f}", f"{low:.3f} - {high:.3f}")
        found = _compare(race, variant)
        if found is None:
            yield (*row, "", "", "", "")
            continue
        met = "yes" if found.wall.median <= found.rival.target else "no"
        wall, cpu = (f"{r.median:.3f} [{r.low:.3f}, {r.high:.3f}]" for r in (found.wall, found.cpu))
        yield (*row, wall, f"{found.rival.target:.2f}", met, cpu)


def _traffic(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, variant in _variants(races):
        parts = [f"{t['count']} {t['kind']} over {len(t['ranks'])} ({t['nbytes']:,})" for t in variant["traffic"]]
        exact = {None: "", True: "exactly", False: "NOT as planned"}[variant["as_planned"]]
        yield race["world_size"], variant["layout"], variant["by"], "; ".join(parts), exact


def _control(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    seen = {}
    for _, variant in _variants(races):
        for message, (count, nbytes) in variant["control"].items():
            seen[variant["by"], message, count, nbytes] = None
    yield from seen


def _states(races: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for race, variant in _variants(races):
        shards = {"ddp": 1, "hybrid": race["world_size"] // 2}.get(variant["layout"], race["world_size"])
        share = 16 * race["parameters"] / shards
        state = variant["state"]
        row = (race["world_size"], variant["layout"], variant["by"], f"{state['total']:,}", f"{share:,.0f}")
        yield *row, f"{state['total'] - share:,.0f}", state["counters"]


def _spread(races: list[dict[str, Any]]) -> float:
    worst = 0.0
    for race in races:
        first, *others = (variant["losses"] for variant in race["variants"].values())
        worst = max([worst, *(abs(a - b) / b for other in others for a, b in zip(other, first, strict=True))])
    return worst


def table(head: Sequence[str], rows: Iterator[tuple[object, ...]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    line: Callable[[Sequence[object]], str] = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |"  # noqa: E731
    return [line(head), line(["---"] * len(head)), *(line(row) for row in rows)]


def _environment(seconds: float, load: float) -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "lightning")}
    machine = {"Python": platform.python_version(), "cores": os.cpu_count(), "load at the start": f"{load:.1f}"}
    return {**packages, **machine, "seconds in all": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="counted steps of each variant")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4], choices=sorted(ROWS))
    parser.add_argument("--dry", action="store_true", help="print the report, write nothing")
    options = parser.parse_args()
    load, start = os.getloadavg()[0], time.perf_counter()
    races = []
    text = ""
    for world_size in options.processes:
        races.append(run_race(world_size, options.rounds))
        environment = _environment(time.perf_counter() - start, load)
        text = report(races, environment)
        print(f"{world_size} processes: done after {environment['seconds in all']} s", file=sys.stderr, flush=True)
        if not options.dry:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / "data_parallel.md").write_text(text)
            (RESULTS / "data_parallel.json").write_text(json.dumps({"environment": environment, "races": races}))
    print(text)


if __name__ == "__main__":
    main()
