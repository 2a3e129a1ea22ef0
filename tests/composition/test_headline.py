"""One unchanged module, fit to resume, under FSDP x TP x PP at once: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition.runs import Layout, Story, all_resumed, resumed, stories, story
from tests.parity.runs import differences
from tests.support.pool import WorkerPool

pytestmark = pytest.mark.timeout(600)
SECONDS = 560.0
ALL_THREE: Layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_shard_size": 2}
LAYOUTS: dict[str, Layout] = {
    "fsdp 8": {"data_parallel_shard_size": 8},
    "tp 2 x fsdp 4": {"tensor_parallel_size": 2, "data_parallel_shard_size": 4},
    "pp 4 x fsdp 2": {"pipeline_parallel_size": 4, "data_parallel_shard_size": 2},
    "2 x 2 x 2": ALL_THREE,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headline")


@pytest.fixture(scope="module")
def one_process(run_single: Any, folder: Path) -> Story:
    return run_single(story, None, str(folder / "one"))


@pytest.fixture(scope="module")
def saved(run_distributed: WorkerPool, folder: Path) -> dict[str, list[Story]]:
    """Layout -> the stories of its ranks."""
    cases = [(layout, str(folder / name), "32-true") for name, layout in LAYOUTS.items()]
    ranks = run_distributed(stories, cases, world_size=8, timeout=SECONDS)
    return {name: [found[number] for found in ranks] for number, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fit_validate_test_predict(saved: dict[str, list[Story]], one_process: Story, layout: str) -> None:
    for rank, ours in enumerate(saved[layout]):
        found = differences(ours.fit, one_process.fit, partial=True)
        assert not found, (rank, found[:10])
        assert ours.evaluated == pytest.approx(one_process.evaluated, rel=1e-5), rank
        assert ours.names == one_process.names, rank
        torch.testing.assert_close(torch.cat(ours.logits), torch.cat(one_process.logits), rtol=1e-4, atol=1e-5)


def test_every_layout_goes_on_from_every_layout(
    run_distributed: WorkerPool, run_single: Any, saved: dict[str, list[Story]], one_process: Story
) -> None:
    paths = {"one process": one_process.checkpoint, **{name: ranks[0].checkpoint for name, ranks in saved.items()}}
    want = run_single(resumed, None, paths["one process"])
    assert want.metrics and len(want.gradients) == 2
    cases = [(target, source) for target in LAYOUTS for source in paths]
    ranks = run_distributed(
        all_resumed, [(LAYOUTS[target], paths[source]) for target, source in cases], world_size=8, timeout=SECONDS
    )
    found = []
    for number, (target, source) in enumerate(cases):
        for rank, records in enumerate(ranks):
            texts = differences(records[number], want, partial=True)
            found += [f"{source} -> {target}, rank {rank}: {text}" for text in texts]
    assert not found, "\n".join([f"{len(found)} differences", *found[:30]])


def test_bf16_mixed(run_distributed: WorkerPool, run_single: Any, folder: Path, one_process: Story) -> None:
    """Rounded elsewhere than in one process, and no further from the exact numbers than twice its error."""
    reference: Story = run_single(story, None, str(folder / "one-bf16"), "bf16-mixed")
    exact = _losses(one_process)
    allowed = 2 * max(abs(a - b) for a, b in zip(_losses(reference), exact, strict=True))
    assert 1e-5 < allowed < 0.05
    cases = [(ALL_THREE, str(folder / "all-bf16"), "bf16-mixed")]
    for (ours,) in run_distributed(stories, cases, world_size=8, timeout=SECONDS):
        assert _losses(ours) == pytest.approx(exact, abs=allowed)
        assert ours.names == reference.names


def _losses(told: Story) -> list[float]:
    return [noted["loss"] for noted in told.fit.metrics if "loss" in noted]
