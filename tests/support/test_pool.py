"""The pool that the other tests stand on: results, errors, hangs, deaths, and what a call leaves behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.support.cluster import PoolEnvironment
from tests.support.pool import RemoteTracebackError, WorkerPool, WorkersFailedError


def sum_of_ranks(factor: int) -> tuple[int, float]:
    tensor = torch.tensor(float(dist.get_rank() * factor))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def imported_before() -> bool:
    return "tests.support.preload" in sys.modules


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError("no rank likes this")


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_unpicklable() -> None:
    raise UnpicklableError(1, 2)


def sleep_on(rank: int, seconds: float) -> None:
    print("about to sleep")
    if dist.get_rank() == rank:
        time.sleep(seconds)
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def leave_a_mess() -> None:
    os.environ["RUBBISH"] = "1"
    Path("file.txt").touch()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def state() -> tuple[object, ...]:
    return (
        "RUBBISH" in os.environ,
        len(list(Path.cwd().iterdir())),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        rank_zero_only.rank,
    )


def lightning_ranks(devices: int, num_nodes: int, plugin: bool) -> tuple[int, int, int, int]:
    plugins = [PoolEnvironment()] if plugin else []
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
    )
    return trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (self.linear(inputs) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_with_ddp(batch_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = Regression()
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Lightning's own sampler always shuffles in training, and one process would not.
    sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
    trainer = Trainer(
        strategy="ddp" if world > 1 else "auto",
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=batch_size // world, sampler=sampler))
    return model.linear.weight.detach()


def make_own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size()


def joined_name(first: str, second: str) -> str:
    return f"{first}-{second}-{dist.is_initialized()}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_call_has_a_group_of_its_own_size(run_distributed: WorkerPool, world_size: int) -> None:
    results = run_distributed(sum_of_ranks, 10, world_size=world_size)
    total = 10.0 * sum(range(world_size))
    assert results == [(rank, total) for rank in range(world_size)]


def test_the_workers_stay_between_calls(run_distributed: WorkerPool) -> None:
    assert run_distributed(process_id) == run_distributed(process_id)


def test_the_workers_import_nothing_anew(run_distributed: WorkerPool) -> None:
    assert run_distributed(imported_before, world_size=4) == [True] * 4


def test_single_has_no_process_group(run_single) -> None:
    assert run_single(joined_name, "a", "b") == "a-b-False"


def test_a_function_may_make_the_group_itself(run_distributed: WorkerPool) -> None:
    assert run_distributed(make_own_group, process_group=False) == [2, 2]


def test_the_first_error_comes_back_with_its_remote_traceback(run_distributed: WorkerPool) -> None:
    with pytest.raises(ValueError, match="rank 1 does not like this") as caught:
        run_distributed(fail_on, 1)
    assert isinstance(caught.value.__cause__, RemoteTracebackError)
    assert "in fail_on" in str(caught.value.__cause__)
    assert run_distributed(sum_of_ranks, 1) == [(0, 1.0), (1, 1.0)]


def test_errors_are_told_rank_by_rank(run_distributed: WorkerPool) -> None:
    errors = run_distributed.errors(fail_everywhere)
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "no rank likes this")] * 2
    assert run_distributed.errors(process_id) == [None, None]


def test_an_exception_that_cannot_be_pickled_is_told_as_text(run_distributed: WorkerPool) -> None:
    with pytest.raises(RuntimeError, match="cannot be pickled") as caught:
        run_distributed(fail_unpicklable)
    assert "UnpicklableError: 1 and 2" in str(caught.value.__cause__)


def test_a_hang_names_the_line_of_every_rank(run_distributed: WorkerPool) -> None:
    with pytest.raises(WorkersFailedError, match=r"ranks \[0, 1\] of 2 did not end in 2 s") as caught:
        run_distributed(sleep_on, 1, 300.0, timeout=2)
    report = str(caught.value)
    assert "in barrier" in report  # where rank 0 is
    assert report.count("in sleep_on") == 2
    assert "about to sleep" in report
    assert run_distributed(sum_of_ranks, 1) == [(0, 1.0), (1, 1.0)]


def test_a_dead_process_is_told_at_once(run_distributed: WorkerPool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkersFailedError, match=r"the process of rank 0 died \(exit code 3\)"):
        run_distributed(die_on, 0, timeout=140)
    assert time.monotonic() - start < 100
    assert run_distributed(sum_of_ranks, 1) == [(0, 1.0), (1, 1.0)]


def test_a_call_leaves_nothing_behind(run_distributed: WorkerPool) -> None:
    run_distributed(leave_a_mess)
    for rank, found in enumerate(run_distributed(state)):
        assert found == (False, 0, torch.float32, True, 1, rank)


@pytest.mark.parametrize("plugin", [False, True], ids=["variables", "plugin"])
def test_lightning_sees_the_ranks_and_the_nodes(run_distributed: WorkerPool, plugin: bool) -> None:
    one_node = run_distributed(lightning_ranks, 4, 1, plugin, world_size=4)
    assert one_node == [(rank, rank, 0, 4) for rank in range(4)]
    two_nodes = run_distributed(lightning_ranks, 2, 2, plugin, world_size=4, num_nodes=2)
    assert two_nodes == [(rank, rank % 2, rank // 2, 4) for rank in range(4)]


def test_training_with_lightning_equals_one_process(run_distributed: WorkerPool, run_single) -> None:
    reference = run_single(train_with_ddp, 8)
    for weight in run_distributed(train_with_ddp, 8):
        torch.testing.assert_close(weight, reference)
