"""SIGKILL of a random rank at random moments of saves, through the Trainer; every restart must go on as if nothing was.

    python -m benchmarks.kill [--kills 20] [--seed 0]

Half of the runs save behind training. Writes ``benchmarks/results/kill.md``.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.support.kill import KILL_AFTER_S, RANKS, STEPS, killed_until_through, losses_of_one_run

RESULTS = Path(__file__).parent / "results" / "kill.md"
KILLS_PER_RUN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    root, started = Path(tempfile.mkdtemp(prefix="pardist-kill-")), time.monotonic()
    chance = random.Random(settings.seed)
    totals = {False: [0, 0, 0], True: [0, 0, 0]}
    try:
        expected = losses_of_one_run(root / "reference")
        run = 0
        while (left := settings.kills - sum(kills for kills, *_ in totals.values())) > 0:
            behind = run % 2 == 1
            kills = min(KILLS_PER_RUN, left)
            outcome = killed_until_through(root / f"run-{run}", expected, chance, kills, behind=behind)
            totals[behind] = [a + b for a, b in zip(totals[behind], (outcome.kills, outcome.resumes, 1), strict=True)]
            print(f"run {run}, {'behind' if behind else 'waiting'}: {outcome}", flush=True)
            run += 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    lines = [
        "# Killed and started again",
        "",
        f"`python -m benchmarks.kill --kills {settings.kills} --seed {settings.seed}`, torch {torch.__version__}, "
        f"{os.cpu_count()} cores shared with other work, {time.monotonic() - started:.0f} s.",
        "",
        f"{RANKS} ranks of `HybridStrategy(zero_stage=3)` train {STEPS} steps over several epochs with dropout, a "
        "shuffled `StatefulDataLoader` and a schedule, and save twice at every step (`save_top_k=2, save_last=True`). "
        f"A random rank gets SIGKILL within {KILL_AFTER_S} s of a random point of the run; the other must end by "
        'itself; then the run starts again with `ckpt_path="last"`. Every loss of every attempt was that of the '
        "uninterrupted run (to 1e-6), no published checkpoint was lost, no rank hung and nothing was left "
        "behind.",
        "",
        "| saves | kills | resumed from a checkpoint | runs that came to their end |",
        "| --- | --- | --- | --- |",
        *(
            f"| {'behind training (`async_save`)' if behind else 'while training waits'} | {k} | {r} | {n} |"
            for behind, (k, r, n) in totals.items()
        ),
        "",
    ]
    RESULTS.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
