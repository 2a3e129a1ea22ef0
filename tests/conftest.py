"""Fixtures for every test. How to write a test over several processes: see ``tests/support/pool.py``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported: the machine's cores are shared by this process and up to four workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.pool import WorkerPool, start_importing


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """The session's worker processes; they start when the first call needs them."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run_distributed(worker_pool: WorkerPool) -> WorkerPool:
    """``run_distributed(function, *args, world_size=4)`` returns one result per rank."""
    return worker_pool


@pytest.fixture(scope="session")
def run_single(worker_pool: WorkerPool) -> Callable[..., Any]:
    """``run_single(function, *args)`` runs it in one worker without a process group: the reference."""
    return worker_pool.single


@pytest.fixture(autouse=True)
def environment_kept() -> Iterator[None]:
    """Undoes what a test does to this process's environment: ``seed_everything`` leaves the seed there."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses the pool, so that ``-m "not distributed"`` leaves it out."""
    for item in items:
        if {"run_distributed", "run_single", "worker_pool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.distributed)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the workers' imports begin while this process runs the first tests, if any test will need them."""
    if not session.config.option.collectonly and any(item.get_closest_marker("distributed") for item in session.items):
        start_importing()
