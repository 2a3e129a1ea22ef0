"""What one GPU shows and a host does not: ours against Lightning there, NCCL, several ranks on a card, pinned copies.

    python -m benchmarks.gpu                         one GPU; about ten minutes
    python -m benchmarks.gpu --device cpu --tiny     the same program on the host, to try it; writes no results

Every section runs in a process of its own (``benchmarks/support/gpu_runs.py``); one that fails is reported as failed.
Results go to ``benchmarks/results/gpu.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECTIONS = ("alone", "turns", "checkpoints", "features", "together")
SECTION_SECONDS = 420.0
Found = dict[str, Any]


def run_section(name: str, device: str, tiny: bool) -> Found:
    """Returns what a section found, or how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.support.gpu_runs", name, "--device", device, "--out", str(out)]
        try:
            done = subprocess.run(
                [*command, *(["--tiny"] if tiny else [])],
                cwd=ROOT, timeout=SECTION_SECONDS, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"no end in {SECTION_SECONDS:.0f} s"}
        if not out.exists():
            return {"error": done.stderr[-3000:]}
        found: Found = json.loads(out.read_text())
        return found


def apart(losses: Sequence[float], reference: Sequence[float]) -> str:
    """Returns the largest relative difference of two runs' losses, in words."""
    if len(losses) != len(reference):
        return f"{len(losses)} steps, not {len(reference)}"
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    return "0" if worst == 0 else f"{worst:.1e}"


def report(found: dict[str, Found], environment: str) -> str:
    """Returns the results as Markdown."""
    writers: dict[str, Callable[[Found], list[str]]] = {
        "alone": _alone,
        "turns": _turns,
        "checkpoints": _checkpoints,
        "features": _features,
        "together": _together,
    }
    lines = ["# One GPU", "", environment, ""]
    for name, section in found.items():
        lines += [*writers[name](section), ""] if "error" not in section else [f"## {name}", "", _failure(section), ""]
    return "\n".join(lines)


def _failure(entry: Found) -> str:
    return "failed: " + str(entry["error"]).strip().splitlines()[-1][:300]


def _alone(section: Found) -> list[str]:
    def rows() -> Iterator[tuple[object, ...]]:
        for precision, runs in section.items():
            for name, run in runs.items():
                if "error" in run:
                    yield precision, name, _failure(run), "", "", ""
                    continue
                reference = runs["auto"]["losses"]
                expected = run["state_bytes"] + run["activation_bytes"] if "state_bytes" in run else None
                yield (
                    precision, name, apart(run["losses"], reference), apart(run["norms"], runs["auto"]["norms"]),
                    _gib(run.get("peak_bytes")), _gib(expected),
                )  # fmt: skip

    return [
        "## The same training",
        "",
        "Largest relative difference to plain Lightning on the same device, over all steps; its second run is the "
        "noise of the device. Mesh of one: sharded code and the device's collectives on one rank. Foretold: the plan's "
        "state bytes and the profile's saved activations.",
        "",
        *_table(("precision", "by", "losses", "gradient norms", "peak GiB", "foretold GiB"), rows()),
    ]


def _turns(section: Found) -> list[str]:
    def rows() -> Iterator[tuple[object, ...]]:
        for precision, seconds in section.items():
            for name, values in seconds.items():
                ratios = [a / b for a, b in zip(values, seconds["auto"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                milliseconds = 1000 * statistics.median(values)
                yield precision, name, f"{milliseconds:.1f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}"

    return [
        "## Step time",
        "",
        "One step of each per round, in an order drawn anew; medians over rounds.",
        "",
        *_table(("precision", "by", "ms", "ratio to auto", "quartiles of the ratio"), rows()),
    ]


def _checkpoints(section: Found) -> list[str]:
    def rows() -> Iterator[tuple[object, ...]]:
        for name, run in section.items():
            if "error" in run:
                yield name, _failure(run), "", "", "", ""
                continue
            first, again = run["stalls"]
            resumed = apart(run["resumed"], run["losses"])
            yield name, f"{run['bytes'] / 2**30:.2f}", f"{first:.2f}", f"{again:.2f}", run["pinned"], resumed

    head = ("saves", "GiB", "first stall s", "second stall s", "host copies pinned", "losses after resuming")
    return ["## Checkpoints of a sharded run", "", *_table(head, rows())]


def _features(section: Found) -> list[str]:
    references = {"accumulation": "auto, accumulation"}

    def rows() -> Iterator[tuple[object, ...]]:
        for name, run in section.items():
            reference = section[references.get(name, "auto")]
            if "error" in run or "error" in reference:
                yield name, _failure(run if "error" in run else reference), ""
                continue
            yield name, apart(run["losses"], reference["losses"]), _gib(run.get("peak_bytes"))

    head = ("run", "losses against plain Lightning", "peak GiB")
    return ["## Offload, compiled blocks, accumulation (bf16-mixed)", "", *_table(head, rows())]


def _together(section: Found) -> list[str]:
    def rows() -> Iterator[tuple[object, ...]]:
        for name, run in section.items():
            if name == "one process":
                continue
            if "error" in run:
                yield name, "", _failure(run), ""
                continue
            for precision, reference in section["one process"].items():
                if "error" in run[precision] or "error" in reference:
                    yield name, precision, _failure(run[precision] if "error" in run[precision] else reference), ""
                else:
                    losses = apart(run[precision]["losses"], reference["losses"])
                    yield name, precision, losses, "yes" if run["ranks_agree"] else "NO"

    head = ("layout", "precision", "losses against one process", "ranks agree")
    return ["## Several ranks on the one device, over gloo", "", *_table(head, rows())]


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"


def _table(head: Sequence[str], rows: Iterator[tuple[object, ...]]) -> list[str]:
    line: Callable[[Sequence[object]], str] = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |"  # noqa: E731
    return [line(head), line(["---"] * len(head)), *(line(row) for row in rows)]


def _environment(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "the host"
    return f"One {name}, torch {torch.__version__}, lightning {version('lightning')}, {os.cpu_count()} cores."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a model that a host trains in no time")
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.md and gpu.json")
    options = parser.parse_args()
    found: dict[str, Found] = {}
    text = ""
    for name in options.only:
        found[name] = run_section(name, options.device, options.tiny)
        text = report(found, _environment(options.device))
        if options.device == "cuda":
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu.md").write_text(text)
            (options.out / "gpu.json").write_text(json.dumps(found, indent=1))
        print(f"{name}: done", file=sys.stderr, flush=True)
    print(text)


if __name__ == "__main__":
    main()
