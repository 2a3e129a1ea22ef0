"""Ours against other libraries, one layout after the other: step time, traffic, memory, and lines that a user writes.

    python -m benchmarks.peers                      2 and 4 gloo processes
    python -m benchmarks.peers --rounds 5 --dry     a quick look that writes no results

All programs of a number of processes train the same Llama of transformers from the same checkpoint on the same data in
turns, one step each per round, in an order drawn anew every round. Each must have the losses of one process. What a
program is made of lies in ``benchmarks/peer_programs``. Libraries that the project does not need are taken if they are
there, and named with their command if not. Results go to ``benchmarks/results/peers.{md,json}``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.peer_programs.report import LOSS_TOLERANCE, loss_error, report
from benchmarks.peer_programs.table import OURS, PROCESSES, PROGRAMS, Program

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "lightning", "transformers", "accelerate")


def run_race(programs: Sequence[Program], rounds: int, timeout: float) -> dict[str, Any]:
    """Returns what ``peer_programs.race`` measured.

    Raises:
        RuntimeError: it failed or took too long; the text is the last error that a rank printed.
    """
    processes = PROCESSES[programs[0].layout]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "race.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "benchmarks.peer_programs.race", f"--out={out}", f"--rounds={rounds}", "--only"]
        command += [program.name for program in programs]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as stream:
            try:
                subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, check=True, timeout=timeout
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"no result after {timeout:.0f} s") from None
            except subprocess.CalledProcessError:
                raise RuntimeError(last_error(log.read_text(errors="replace"))) from None
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def last_error(log: str) -> str:
    """Returns the error that a log ends with; a lost connection only if there is no other."""
    errors = re.findall(r"^(?:\[rank\d+\]: ?)?(\w+(?:\.\w+)*Error: .*)$", log, re.MULTILINE)
    errors = [error for error in errors if "ChildFailedError" not in error]
    causes = [error for error in errors if "gloo" not in error]
    return (causes or errors or ["no error was printed"])[0].strip()


def try_doubtful(programs: Sequence[Program], timeout: float) -> dict[str, str]:
    """Runs the doubtful programs one by one: name -> why it cannot take part."""
    excluded = {}
    for program in programs:
        try:
            found = run_race([program], rounds=1, timeout=timeout)
        except RuntimeError as error:
            excluded[program.name] = f"does not train: {error}"
            continue
        error = loss_error(found, program.name)
        if error > LOSS_TOLERANCE:
            excluded[program.name] = f"losses differ from one process by {error:.1e}"
    return excluded


def environment(seconds: float, load: float) -> dict[str, Any]:
    """Returns what was measured with, and how busy the machine was."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    machine = {"Python": platform.python_version(), "cores": os.cpu_count()}
    loads = {"load at the start": round(load, 1), "load at the end": round(os.getloadavg()[0], 1)}
    return {**found, **machine, **loads, "seconds in all": round(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="counted steps of each program")
    parser.add_argument("--layouts", nargs="*", default=list(PROCESSES), choices=list(PROCESSES))
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one race")
    parser.add_argument("--dry", action="store_true", help="print the report, write nothing")
    options = parser.parse_args()
    load, start = os.getloadavg()[0], time.perf_counter()
    chosen = [program for program in PROGRAMS if program.layout in options.layouts]
    excluded = {program.name: f"`{program.needs}` is not installed" for program in chosen if program.missing}
    chosen = [program for program in chosen if not program.missing]
    excluded |= try_doubtful([program for program in chosen if program.doubtful], options.timeout / 10)
    chosen = [program for program in chosen if program.name not in excluded]
    races = []
    for processes in sorted({PROCESSES[program.layout] for program in chosen}):
        racing = [program for program in chosen if PROCESSES[program.layout] == processes]
        races.append(run_race(racing, options.rounds, options.timeout))
        print(f"{processes} processes: done", file=sys.stderr, flush=True)
    command = "python -m benchmarks.peers" + (f" --rounds {options.rounds}" if options.rounds != 30 else "")
    facts = environment(time.perf_counter() - start, load)
    text = report(races, excluded, facts, command)
    print(text)
    if not options.dry:
        (RESULTS / "peers.md").write_text(text)
        (RESULTS / "peers.json").write_text(json.dumps({"environment": facts, "excluded": excluded, "races": races}))
    wrong = [
        name for race in races for name in race["programs"] if OURS in name and loss_error(race, name) > LOSS_TOLERANCE
    ]
    sys.exit(f"losses differ from those of one process: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
