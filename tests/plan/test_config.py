"""What the user asks for becomes sizes of mesh axes, or a refusal, without a process group."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pardist.specs.config import AxisSizes, ParallelConfig
from lightning_pardist.strategies.presets import PRESETS


def sizes(config: dict[str, Any], world_size: int, nodes: int = 1) -> tuple[int, int]:
    found = ParallelConfig(**config).resolve(world_size=world_size, num_nodes=nodes)
    assert found.world_size == world_size
    return found.data_parallel_replicate, found.data_parallel_shard


@pytest.mark.parametrize(
    ("config", "world_size", "nodes", "expected"),
    [
        ({}, 1, 1, (1, 1)),
        ({}, 8, 1, (1, 8)),  # one node: everything is shared
        ({}, 16, 2, (2, 8)),  # one copy per node
        ({}, 512, 64, (64, 8)),
        ({}, 6, 4, (2, 3)),  # nodes that do not divide the ranks: the largest number of copies that does
        ({"data_parallel_replicate_size": 4}, 16, 2, (4, 4)),
        ({"data_parallel_shard_size": 4}, 16, 2, (4, 4)),
        ({"data_parallel_shard_size": 16}, 16, 2, (1, 16)),
        ({"data_parallel_replicate_size": 2, "data_parallel_shard_size": 8}, 16, 1, (2, 8)),
        ({"zero_stage": 0}, 16, 2, (16, 1)),
        ({"zero_stage": 0, "data_parallel_replicate_size": 16}, 16, 2, (16, 1)),
        ({"zero_stage": 0, "data_parallel_shard_size": 1}, 16, 2, (16, 1)),
        ({"zero_stage": 1, "data_parallel_replicate_size": 1}, 16, 2, (1, 16)),
    ],
)
def test_auto_sizes(config: dict[str, Any], world_size: int, nodes: int, expected: tuple[int, int]) -> None:
    assert sizes(config, world_size, nodes) == expected


@pytest.mark.parametrize(
    ("name", "one_node", "two_nodes"),
    [
        ("pardist_ddp", (8, 1), (16, 1)),
        ("pardist_zero1", (1, 8), (1, 16)),
        ("pardist_zero2", (1, 8), (1, 16)),
        ("pardist_fsdp", (1, 8), (1, 16)),
        ("pardist_hybrid", (1, 8), (2, 8)),
        ("pardist_pp", (1, 1), (1, 8)),
        ("pardist_tp", (1, 1), (1, 2)),
        ("pardist_3d", (1, 2), (1, 1)),
    ],
)
def test_presets(name: str, one_node: tuple[int, int], two_nodes: tuple[int, int]) -> None:
    arguments = dict(PRESETS[name].arguments)
    assert sizes(arguments, 8) == one_node
    assert sizes(arguments, 16, 2) == two_nodes


@pytest.mark.parametrize(
    ("world_size", "nodes", "expected"), [(8, 1, (2, 2, 2)), (4, 1, (2, 1, 2)), (32, 4, (2, 2, 8)), (16, 2, (2, 1, 8))]
)
def test_three_axes(world_size: int, nodes: int, expected: tuple[int, int, int]) -> None:
    """Matrices are shared inside a node, stages lie across nodes, the rest shards."""
    made = ParallelConfig(**PRESETS["pardist_3d"].arguments).resolve(world_size=world_size, num_nodes=nodes)
    assert (made.pipeline_parallel, made.data_parallel_shard, made.tensor_parallel) == expected
    assert made.data_parallel_replicate == 1


@given(
    replicate=st.one_of(st.just("auto"), st.integers(1, 12)),
    shard=st.one_of(st.just("auto"), st.integers(1, 12)),
    stage=st.integers(0, 3),
    world_size=st.integers(1, 48),
    nodes=st.integers(1, 6),
)
def test_sizes_multiply_to_the_world_or_are_refused(
    replicate: Any, shard: Any, stage: int, world_size: int, nodes: int
) -> None:
    options: Any = {
        "data_parallel_replicate_size": replicate,
        "data_parallel_shard_size": shard,
        "zero_stage": stage,
    }
    if stage == 0 and shard not in ("auto", 1):
        with pytest.raises(ValueError, match="nothing can be sharded"):
            ParallelConfig(**options)
        return
    config = ParallelConfig(**options)
    copies = 1 if replicate == "auto" else replicate
    shares = 1 if shard == "auto" else shard
    fixed = replicate != "auto" and (shard != "auto" or stage == 0)
    if world_size % (copies * shares) or (fixed and copies * shares != world_size):
        with pytest.raises(ValueError, match=rf"for {world_size} rank\(s\)"):
            config.resolve(world_size=world_size, num_nodes=nodes)
        return
    found = config.resolve(world_size=world_size, num_nodes=nodes)
    assert found.world_size == world_size
    assert replicate in ("auto", found.data_parallel_replicate)
    assert stage == 0 or shard in ("auto", found.data_parallel_shard)
    assert stage > 0 or found.data_parallel_shard == 1


def test_axes_are_outer_to_inner() -> None:
    assert list(AxisSizes().as_dict()) == [
        "pipeline_parallel",
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
    ]
    assert AxisSizes(data_parallel_replicate=2, data_parallel_shard=4).data_parallel == 8


def test_a_config_is_a_value() -> None:
    config = ParallelConfig(fsdp_units=("Block",))
    assert config == ParallelConfig(fsdp_units=("Block",))
    assert hash(config) == hash(ParallelConfig(fsdp_units=("Block",)))
    with pytest.raises(AttributeError):
        config.zero_stage = 1  # type: ignore[misc]


def test_stages_by_node_or_by_device() -> None:
    config = ParallelConfig(pipeline_parallel_size="auto")
    assert config.resolve(world_size=8) == AxisSizes(pipeline_parallel=8)
    assert config.resolve(world_size=16, num_nodes=2) == AxisSizes(pipeline_parallel=2, data_parallel_shard=8)
    fixed = ParallelConfig(pipeline_parallel_size=2)
    assert fixed.resolve(world_size=16, num_nodes=4) == AxisSizes(
        pipeline_parallel=2, data_parallel_replicate=2, data_parallel_shard=4
    )
    with pytest.raises(ValueError, match=r"pipeline_parallel 3"):
        ParallelConfig(pipeline_parallel_size=3).resolve(world_size=8)
