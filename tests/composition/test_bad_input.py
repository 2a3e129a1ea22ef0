"""Wrong settings in combination: the same four parts on all ranks, before anything is spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pardist import HybridStrategy, PipelineOptions, RecomputeOptions
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.strategies.presets import PRESETS
from tests.bad_input.common import four_parts
from tests.composition.headline import Headline, Texts
from tests.composition.runs import trainer_for
from tests.resume.common import logged
from tests.support.pool import WorkerPool

BOTH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("config", "world_size"),
    [({**BOTH, "data_parallel_shard_size": 3}, 8), (dict(PRESETS["pardist_3d"].arguments), 6), (BOTH, 2)],
)
def test_a_wrong_product_names_each_axis_and_what_would_fit(config: dict[str, Any], world_size: int) -> None:
    with pytest.raises(ValueError, match="must multiply to the number of ranks") as caught:
        ParallelConfig(**config).resolve(world_size=world_size)
    text = str(caught.value)
    four_parts(text)
    assert "pipeline_parallel 2" in text and "tensor_parallel" in text and f"sizes that divide {world_size}" in text


def test_compiled_blocks_on_a_tensor_axis() -> None:
    with pytest.raises(ValueError, match="run eagerly") as caught:
        HybridStrategy(**BOTH, compile=True)
    four_parts(str(caught.value))


def test_offload_of_stages() -> None:
    with pytest.raises(ValueError, match="cannot be kept in host memory") as caught:
        HybridStrategy(**BOTH, cpu_offload=True)
    four_parts(str(caught.value))


def fit(layout: dict[str, Any]) -> list[str]:
    torch.manual_seed(0)
    trainer = trainer_for(layout, max_steps=1, accumulate_grad_batches=1, enable_checkpointing=False)
    with logged() as lines:
        trainer.fit(Headline(), DataLoader(Texts(8, 5), batch_size=4))
    return lines


def test_recompute_names_that_match_nothing(run_distributed: WorkerPool) -> None:
    layout = {**BOTH, "recompute": RecomputeOptions(blocks=["DecoderLayer"])}
    errors = run_distributed.errors(fit, layout, world_size=4)
    assert len({str(error) for error in errors}) == 1
    four_parts(str(errors[0]))
    assert "DecoderLayer" in str(errors[0])


def test_fewer_micro_batches_than_stages_are_warned_of_with_the_bubble(run_distributed: WorkerPool) -> None:
    layout = {"pipeline_parallel_size": 2, "pipeline": PipelineOptions(schedule="gpipe", num_microbatches=1)}
    first, second = run_distributed(fit, layout, world_size=2)
    assert any("1 micro-batch(es) for a pipeline of 2 ranks leave 50 % of the time idle" in line for line in first), (
        first
    )
    assert not any("micro-batch" in line for line in second)  # said once
