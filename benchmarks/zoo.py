"""Models as they are, trained in one process and on two: equal, refused with a reason, or wrong?

    python -m benchmarks.zoo                                       all models, all layouts
    python -m benchmarks.zoo --only 'transformers/*llama*' --layouts tp,pp
    python -m benchmarks.zoo --write benchmarks/results/zoo.md     adds to the results there, and writes them

Every causal language model of transformers that runs small from its config, the most used vision models of timm and
torchvision, and LightningModules as users write them; random weights, dropout off. Each is wrapped in a LightningModule
with a plain ``training_step`` and takes two steps of SGD with clipping, in one process and under ``HybridStrategy`` on
two: ``fsdp`` (shard 2), ``tp`` (tensor 2) and ``pp`` (pipeline 2), with the same global batch of four rows.

*Equal*: losses, every gradient before clipping, what clipping multiplied by, and the weights after two steps differ
by at most 1e-5, relative as ``support/zoo_run.py`` says; fp32. Where a model's own rounding is coarser (the same step
rounds differently in another order), both runs are repeated in 64-bit numbers under the same bound; the table says
so. A model that makes more of rounding than that even then (norms in fp32 inside, huge gradients) is compared with
itself: *within its own rounding* means that one process, its first weights moved by 5e-7 of themselves, differs from
one process by more than the layout does. A loss that is not a mean over rows (balance of experts over a whole batch)
cannot be the same in parts: it must equal one process that accumulates the same parts; the table says so. Batch norms
are synchronised (``Trainer(sync_batchnorm=True)``), and pipelines with batch norms take their batch in one
micro-batch.

*Refused*: an error with the rule and a way out, on every rank, before the first step. *Wrong*: anything else, a crash
or a hang included. For tp, *not sharded* is the refusal to run a plan that is empty.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.support.zoo_models import names
from benchmarks.support.zoo_page import page
from benchmarks.support.zoo_rows import Row, Verdict
from benchmarks.support.zoo_run import LAYOUTS, Asked, Reference, Result, compared, own_rounding, reference
from tests.support.pool import WorkerPool, WorkersFailedError

LIMIT_S = 240.0
"""For one model on one layout, on a busy machine."""


def measure(name: str, layouts: list[str], pool: WorkerPool, limit: float, attempt: int | None = None) -> Row:
    """Returns the row of one model.

    Args:
        name: of the case.
        layouts: to try.
        pool: of workers.
        limit: seconds for each run.
        attempt: which way of making it small an earlier run found.
    """
    row = Row(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes.pt"
        try:
            first = pool.single(reference, Asked(name, None, attempt), file, timeout=limit)
        except Exception as error:
            row.unusable = f"{type(error).__name__}: {_first_line(error)}"
            return row
        row.parameters, row.attempt = first.parameters, first.attempt
        if first.is_random:
            row.unusable = "its step is random, and nothing turns that off"
            return row
        for layout in layouts:
            started = time.perf_counter()
            row.layouts[layout] = _Trial(name, layout, first, file, pool, limit).verdict()
            row.layouts[layout].seconds = round(time.perf_counter() - started, 1)
    return row


@dataclass
class _Trial:
    """One model on one layout, with the second looks that a difference deserves."""

    name: str
    layout: str
    first: Reference
    file: Path
    pool: WorkerPool
    limit: float

    def verdict(self) -> Verdict:
        whole = self.layout == "pp" and self.first.has_batch_norm
        asked = Asked(self.name, self.layout, self.first.attempt, whole_batch=whole)
        found = self._compared(asked)
        if found.kind != "wrong" or not found.differs:
            return found
        looks: list[tuple[str, Callable[[], Verdict]]] = [
            ("64-bit", lambda: self._again(replace(asked, double=True), parts=1)),
        ]
        if self.layout == "fsdp":
            looks.append(("as accumulated", lambda: self._again(asked, parts=2)))
            looks.append(("as accumulated, 64-bit", lambda: self._again(replace(asked, double=True), parts=2)))
        elif self.layout == "pp" and not whole:
            looks.append(("whole batch", lambda: self._again(replace(asked, whole_batch=True), parts=1)))
            looks.append(
                ("whole batch, 64-bit", lambda: self._again(replace(asked, whole_batch=True, double=True), parts=1))
            )
        for word, look in looks:
            second = look()
            if second.kind == "equal":
                second.how = word
                second.first_error = found.error
                return second
        return self._against_rounding(found, asked)

    def _against_rounding(self, found: Verdict, asked: Asked) -> Verdict:
        """Some models make so much of rounding that one process differs from itself by as much."""
        own = self.pool.single(own_rounding, replace(asked, layout=None), self.file, timeout=self.limit)
        if found.error <= own:
            found.kind, found.how, found.first_error = "equal", "within its own rounding", own
        return found

    def _again(self, asked: Asked, parts: int) -> Verdict:
        file = self.file.with_name("again.pt")
        try:
            self.pool.single(reference, replace(asked, layout=None, parts=parts), file, timeout=self.limit)
        except Exception as error:
            return Verdict("wrong", reason=_first_line(error))
        return self._compared(asked, file)

    def _compared(self, asked: Asked, file: Path | None = None) -> Verdict:
        try:
            results: list[Result] = self.pool(compared, asked, file or self.file, world_size=2, timeout=self.limit)
        except WorkersFailedError as error:
            return Verdict("wrong", reason=f"hang: {str(error)[:2000]}")
        except Exception as error:
            text = str(error)
            trace = str(error.__cause__ or "")
            if "\n  Got: " in text and "\n  Change: " in text and "in pl_module" not in text:
                kind = "not sharded" if text.startswith("A tensor axis needs linear layers") else "refused"
                return Verdict(kind, reason=text)
            return Verdict("wrong", reason=f"crash: {type(error).__name__}: {text[:600]}", trace=trace[-3000:])
        differences = [text for result in results for text in result.differences]
        missing = set(self.first.names) - {name for result in results for name in result.compared}
        if missing:
            differences.append(f"on no rank: {sorted(missing)[:3]}")
        error = max(result.error for result in results)
        kind = "wrong" if differences else "equal"
        return Verdict(kind, error, results[0].details, reason="; ".join(differences[:6]), differs=len(differences))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", help="a pattern of names such as 'timm/*'; may be given several times"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="some of fsdp,tp,pp")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one model on one layout")
    parser.add_argument("--write", type=Path, help="the page; results of earlier runs are kept in the .json beside it")
    parser.add_argument("--missing", action="store_true", help="leave out what was equal (or not sharded) before")
    given = parser.parse_args()
    layouts = given.layouts.split(",")
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"no such layout: {sorted(unknown)}; there are {', '.join(LAYOUTS)}")
    logging.disable(logging.WARNING)
    everything = names()
    for family, members in everything.items():
        if not members:
            print(f"{family} is not installed", flush=True)
    chosen = [name for members in everything.values() for name in members]
    if given.only:
        chosen = [name for name in chosen if any(fnmatch.fnmatch(name, pattern) for pattern in given.only)]
    store = given.write.with_suffix(".json") if given.write else None
    rows = _read(store)
    pool = WorkerPool()
    try:
        for name in chosen:
            done = rows[name].layouts if given.missing and name in rows else {}
            left = [x for x in layouts if x not in done or done[x].kind in ("wrong", "refused")]
            if not left or (given.missing and name in rows and rows[name].unusable):
                continue
            row = measure(name, left, pool, given.limit, rows[name].attempt if name in rows else None)
            if name in rows and not row.unusable:
                row.layouts = {**rows[name].layouts, **row.layouts}
            rows[name] = row
            print(row.line(), flush=True)
            if store is not None:
                store.write_text(json.dumps([asdict(r) for r in rows.values()], indent=1))
    finally:
        pool.close()
    text = page(list(rows.values()), everything)
    if given.write:
        given.write.write_text(text)
    else:
        print(text)


def _read(store: Path | None) -> dict[str, Row]:
    if store is None or not store.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(store.read_text())
    made = [Row(**{**row, "layouts": {k: Verdict(**v) for k, v in row["layouts"].items()}}) for row in rows]
    return {row.name: row for row in made}


if __name__ == "__main__":
    main()
