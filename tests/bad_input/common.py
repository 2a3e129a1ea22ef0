"""What every test of bad input asks: the same error on every rank, in four parts, within seconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_pardist.strategies.hybrid import HybridStrategy
from tests.support.modules import Regression
from tests.support.pool import WorkerPool


def trainer(strategy: Any = None, **options: Any) -> L.Trainer:
    """A quiet Trainer over all ranks of the call; ``strategy`` a name, a strategy, or HybridStrategy's arguments."""
    if strategy is None or isinstance(strategy, dict):
        strategy = HybridStrategy(**{"print_plan": False, **(strategy or {})})
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "max_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "strategy": strategy,
    }
    return L.Trainer(**{**defaults, **options})


def loader(module: Any, rows: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(module.dataset(rows, seed=1), batch_size=batch_size)


def fit(strategy: Any = None, module: Any = None, **options: Any) -> None:
    module = module or Regression()
    trainer(strategy, **options).fit(module, loader(module))


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def errors_of(cases: Sequence[Case]) -> list[BaseException | None]:
    """Runs many cases in one call: what each raised on this rank, and that the ranks are still in step after it."""
    found: list[BaseException | None] = []
    for function, args in cases:
        error: BaseException | None = None
        try:
            function(*args)
        except Exception as caught:
            error = type(caught)(str(caught))
        found.append(error)
        count = torch.ones(())
        dist.all_reduce(count)  # a rank that left the others waiting would show here
        assert int(count) == dist.get_world_size()
    return found


def check(
    run_distributed: WorkerPool,
    cases: Sequence[tuple[Callable[..., Any], tuple[Any, ...], str]],
    *,
    world_size: int = 2,
    kind: type[Exception] = ValueError,
) -> list[str]:
    """Asserts that each case fails on all ranks alike, in four parts, as its pattern wants; returns the texts."""
    results = run_distributed(errors_of, [(function, args) for function, args, _ in cases], world_size=world_size)
    texts = []
    for (_, args, pattern), raised in zip(cases, zip(*results, strict=True), strict=True):
        assert all(error is not None for error in raised), f"{args}: not refused on every rank: {raised}"
        assert {type(error) for error in raised} == {kind}, raised
        assert len({str(error) for error in raised}) == 1, f"{args}: ranks differ: {raised}"
        texts.append(four_parts(str(raised[0])))
        assert re.search(pattern, texts[-1], re.DOTALL), f"{pattern!r} is not in\n{texts[-1]}"
    return texts


def four_parts(text: str) -> str:
    assert re.search(r"\S.*\n  Got: .+\n  From: .+\n  Change: .+", text, re.DOTALL), f"not in four parts:\n{text}"
    return text
