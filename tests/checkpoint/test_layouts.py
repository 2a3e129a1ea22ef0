"""A checkpoint of any layout loads in any other: same bits, same losses afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_pardist.checkpoint import LoadRequest, SaveInfo, load_checkpoint, save_checkpoint
from lightning_pardist.specs.checkpoint_options import CheckpointOptions
from tests.checkpoint import runs

FORMATS = ("sharded", "full")


def save_in(layout: str, folder: str) -> dict[str, Any]:
    run, group = runs.build(layout), runs.control()
    runs.train(run, range(3))
    for kind in FORMATS:
        save_checkpoint(
            f"{folder}/{layout}-{kind}",
            run.state(rank_state={"rank": runs.world()[0]}),
            SaveInfo(step=3, layout={"name": layout}),
            options=CheckpointOptions(format=kind, timeout_s=120),
            control_group=group,
        )
    before = {"weights": runs.weights(run.module), "optimizer": runs.optimizer_state(run)}
    return {**before, "losses": runs.train(run, range(3, 6))}


def load_in(layout: str, folder: str, sources: list[str]) -> dict[str, Any]:
    group = runs.control()
    out = {}
    for source in sources:
        run = runs.build(layout)
        if source.startswith("hybrid"):
            runs.train(run, range(1))  # state that is there already is overwritten
        request = LoadRequest(layout={"name": layout})
        options = CheckpointOptions(timeout_s=120)
        report = load_checkpoint(f"{folder}/{source}", run.state(), request, options=options, control_group=group)
        for scheduler, saved in zip(run.schedulers, report.trainer["lr_schedulers"]):
            scheduler.load_state_dict(saved)
        out[source] = {
            "weights": runs.weights(run.module),
            "optimizer": runs.optimizer_state(run),
            "losses": runs.train(run, range(3, 6)),
            "rank_state": report.rank_state,
            "notes": report.notes,
        }
    return out


@pytest.fixture(scope="module")
def saved(
    run_distributed: Any, run_single: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("matrix")
    results = {}
    for layout, size in runs.LAYOUTS.items():
        if size == 1:
            results[layout] = run_single(save_in, layout, str(folder))
        else:
            results[layout] = run_distributed(save_in, layout, str(folder), world_size=size)[0]
    return folder, results


@pytest.mark.parametrize("target", runs.LAYOUTS)
def test_every_layout_loads_every_other(saved: Any, run_distributed: Any, run_single: Any, target: str) -> None:
    folder, results = saved
    sources = [f"{layout}-{kind}" for layout in runs.LAYOUTS for kind in FORMATS]
    size = runs.LAYOUTS[target]
    if size == 1:
        ranks = [run_single(load_in, target, str(folder), sources)]
    else:
        ranks = run_distributed(load_in, target, str(folder), sources, world_size=size)
    for source in sources:
        expected = results[source.partition("-")[0]]
        for rank, result in enumerate(ranks):
            assert runs.same(expected["weights"], result[source]["weights"]) == []
            assert runs.same(expected["optimizer"], result[source]["optimizer"]) == []
            assert result[source]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert result[source]["notes"] == []
            own = {"rank": rank} if source == f"{target}-sharded" else None
            assert result[source]["rank_state"] == own
