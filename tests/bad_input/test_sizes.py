"""Sizes and options that no world can satisfy are refused before any rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.strategies.hybrid import HybridStrategy
from tests.bad_input.common import check, fit, four_parts, trainer
from tests.support.modules import Regression
from tests.support.pool import WorkerPool

SIZES = [
    "data_parallel_replicate_size",
    "data_parallel_shard_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "two", "Auto", None, True, [2]])
def test_a_size_is_a_positive_integer(name: str, value: Any) -> None:
    for make in (HybridStrategy, ParallelConfig):
        with pytest.raises(ValueError, match=rf"(?s){name} must be a positive integer.*Got: {name}=") as caught:
            make(**{name: value})
        four_parts(str(caught.value))


@pytest.mark.parametrize("name", SIZES[4:])
def test_an_axis_of_a_later_version_stays_at_one(name: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)must be of size 1.*Got: {name}=2") as caught:
        HybridStrategy(**{name: 2})
    four_parts(str(caught.value))
    HybridStrategy(**{name: 1})


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"zero_stage": 0, "data_parallel_shard_size": 2}, "zero_stage=0.*data_parallel_shard_size=2"),
        ({"zero_stage": 0, "cpu_offload": True}, "zero_stage=0, cpu_offload=True"),
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stage": "3"}, "zero_stage='3'"),
        ({"zero_stage": True}, "zero_stage=True"),
        ({"gradient_clip_norm_type": 0}, "gradient_clip_norm_type=0"),
        ({"gradient_clip_norm_type": -2.0}, "gradient_clip_norm_type=-2.0"),
        ({"gradient_clip_norm_type": float("-inf")}, "gradient_clip_norm_type=-inf"),
        ({"gradient_clip_norm_type": float("nan")}, "gradient_clip_norm_type=nan"),
        ({"gradient_clip_norm_type": "inf"}, "gradient_clip_norm_type='inf'"),
        ({"on_nonfinite_loss": "ignore"}, "on_nonfinite_loss='ignore'"),
        ({"fsdp_units": "Block"}, "fsdp_units='Block'"),
        ({"fsdp_units": [3]}, "fsdp_units"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes'"),
    ],
)
def test_options_that_exclude_each_other_or_mean_nothing(arguments: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match="(?s)Got: .*" + pattern) as caught:
        HybridStrategy(**arguments)
    four_parts(str(caught.value))


def test_sizes_must_multiply_to_the_ranks(run_distributed: WorkerPool) -> None:
    cases = [
        (fit, ({"data_parallel_replicate_size": 3},), r"replicate 3.*for 2 rank"),
        (fit, ({"data_parallel_shard_size": 4},), r"shard 4.*for 2 rank"),
        (
            fit,
            ({"data_parallel_shard_size": 1, "data_parallel_replicate_size": 1},),
            r"replicate 1 x .*shard 1 ",
        ),
        (fit, ({"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2},), r"replicate 2 x .*shard 2.*4\)"),
        (fit, ({"zero_stage": 0, "data_parallel_replicate_size": 1},), r"replicate 1 .*zero_stage=0.*for 2 rank"),
        (validate, ({"data_parallel_shard_size": 3},), r"divide 2 are \[1, 2\]"),
    ]
    check(run_distributed, cases)


def validate(strategy: dict[str, Any]) -> None:
    from tests.bad_input.common import loader

    module = Regression()
    trainer(strategy).validate(module, loader(module), verbose=False)


def test_replicas_need_ranks(run_single: Any) -> None:
    text = run_single(refused_on_one_rank)
    assert "data_parallel_replicate 2" in four_parts(text)


def refused_on_one_rank() -> str:
    with pytest.raises(ValueError, match="must multiply") as caught:
        fit({"data_parallel_replicate_size": 2})
    return str(caught.value)


def sizes_before_the_processes_meet() -> str:
    """No process group exists yet: were the check made later, this rank would wait for the others here."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="must multiply") as caught:
        trainer({"data_parallel_shard_size": 3}, devices=4).fit(Regression(), [])
    assert not dist.is_initialized()
    return str(caught.value)


def test_wrong_sizes_are_found_before_the_processes_meet(run_distributed: WorkerPool) -> None:
    texts = run_distributed(sizes_before_the_processes_meet, world_size=4, process_group=False)
    assert len(set(texts)) == 1


def test_options_of_axes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)nothing to act on.*Got: tensor=TensorOptions.*From.*Change"):
        HybridStrategy(tensor=TensorOptions(sequence_parallel=True))
    with pytest.raises(ValueError, match=r"(?s)need stages.*Got: pipeline=PipelineOptions") as caught:
        HybridStrategy(pipeline=PipelineOptions())
    four_parts(str(caught.value))
