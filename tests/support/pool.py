"""A pool of worker processes that run one function on every rank of a fresh process group.

Starting Python, torch and Lightning takes seconds; a fork and a process group take milliseconds. So one process imports
everything once per test session (``tests/support/preload.py``), the workers are forked from it when the first test asks
for them, and every call makes its own default process group.

How to write a test with it::

    def train(steps: int) -> list[float]:                  # a top-level function: it travels by name
        seed_everything(0)
        trainer = Trainer(strategy="pardist_hybrid", accelerator="cpu", devices=dist.get_world_size(), ...)
        ...
        return losses                                      # anything that can be pickled

    def test_losses_equal_one_process(run_distributed, run_single):
        ours = run_distributed(train, 5, world_size=4)     # one result per rank, in the order of the ranks
        reference = run_single(train, 5)                   # in a worker too, without a process group
        assert ours[0] == pytest.approx(reference, rel=1e-5)

    def test_bad_sizes(run_distributed):
        errors = run_distributed.errors(train_with_bad_sizes, world_size=2)    # one exception (or None) per rank
        assert len({str(error) for error in errors}) == 1

On every rank, before the call: ``LOCAL_RANK``, ``RANK``, ``WORLD_SIZE`` and so on are set as a launcher would set them
(so Lightning starts no processes of its own; ``num_nodes=2`` splits the ranks over two pretended nodes), the default
process group is made (gloo; not with ``process_group=False``), the working directory is an empty folder shared by the
ranks, torch has one thread, and the random generators are seeded *differently on each rank*, as in real programs
without ``seed_everything``. All of it is undone after the call.

If ranks fail, the exception of the rank that failed first is raised here, its remote traceback as the cause. If a rank
does not end in ``timeout`` seconds or its process dies, every worker is killed (the next call starts new ones) and the
test fails with the Python stacks of all ranks and the last lines they printed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import worker
from tests.support.jobs import Cleaned, Job, Outcome

if TYPE_CHECKING:
    from torch.distributed import TCPStore

DEFAULT_TIMEOUT = 150.0
"""Seconds for one call: many times what any takes on an idle machine, and below pytest's own limit for a test."""
START_TIMEOUT = 200.0
"""Seconds until the workers' imports are done, on a busy machine; it takes 6 on an idle one."""
CLEAN_TIMEOUT = 60.0
"""Seconds for a worker to put its process back into its first state."""
MOST_THREADS = 48
"""A worker with more after a call is replaced. What failed runs leave in torch's C++ keeps process groups alive, whose
threads wake up a hundred times a second: with hundreds of them every later test would be many times slower."""
GRACE = 10.0
"""Seconds that the other ranks get to end after the first one failed."""
ENVIRONMENT = dict(os.environ)
"""Of the workers: as the session began, whatever tests in this process have set since (such as Lightning's seed)."""


class WorkersFailedError(AssertionError):
    """A call that did not end on every rank: a rank hung or its process died."""


class RemoteTracebackError(Exception):
    """The traceback of a worker, as text; the cause of the exception raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    stacks: Path

    def ended(self) -> bool:
        return not self.process.is_alive()


def start_importing() -> None:
    """Starts the process that imports what the workers need, if it does not run; does not wait for it."""
    before = os.environ.get("PYTHONPATH")
    # Python 3.11's fork server imports before it is told of this process's search path.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        multiprocessing.set_forkserver_preload(["tests.support.preload"])
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class WorkerPool:
    """The workers of one test session, at most as many as the largest world that a test asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[_Worker] = []
        self._store: TCPStore | None = None
        self._calls = 0
        self._root = Path(tempfile.mkdtemp(prefix="pardist-pool-"))

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        num_nodes: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        process_group: bool = True,
    ) -> list[Any]:
        """Returns what ``function(*args)`` returned on each rank; raises what the first failing rank raised."""
        outcomes = self._run(
            function, args, world_size, num_nodes=num_nodes, timeout=timeout, process_group=process_group
        )
        return _values(outcomes)

    def errors(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        num_nodes: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        process_group: bool = True,
    ) -> list[BaseException | None]:
        """Returns the exception of each rank, None for a rank that returned; every rank must end in ``timeout``."""
        outcomes = self._run(
            function, args, world_size, num_nodes=num_nodes, timeout=timeout, process_group=process_group, grace=timeout
        )
        return [_error(outcome) for outcome in outcomes]

    def single(self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Returns ``function(*args)`` run in one worker without a process group: the reference of a comparison."""
        (value,) = _values(self._run(function, args, 1, num_nodes=1, timeout=timeout, process_group=False))
        return value

    def close(self) -> None:
        """Ends the workers; a later call would start new ones."""
        for each in self._workers:
            each.pipe.close()  # the worker reads the end of its pipe and leaves
        deadline = time.monotonic() + 5
        for each in self._workers:
            each.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        self._store = None
        shutil.rmtree(self._root, ignore_errors=True)

    def kill(self) -> None:
        """Kills every worker at once, and what they started."""
        for each in self._workers:
            if not each.ended():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(each.process.pid, signal.SIGKILL)  # each worker leads its own process group
                each.process.kill()
            each.process.join()
            each.pipe.close()
        self._workers = []

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        world_size: int,
        *,
        num_nodes: int,
        timeout: float,
        process_group: bool,
        grace: float = GRACE,
    ) -> list[Outcome]:
        if world_size % num_nodes:
            raise ValueError(f"{world_size} ranks cannot be split evenly over {num_nodes} nodes")
        payload = pickle.dumps((function, args))
        folder = Path(tempfile.mkdtemp(prefix="call-", dir=self._root))
        try:
            self._start(world_size)
            workers = self._workers[:world_size]
            port = self._store_port()
            main_port = _free_port()
            for rank, each in enumerate(workers):
                job = Job(
                    payload=payload,
                    rank=rank,
                    world_size=world_size,
                    num_nodes=num_nodes,
                    process_group=process_group,
                    call=self._calls,
                    store_port=port,
                    main_port=main_port,
                    folder=str(folder),
                    log=str(self._log(rank)),
                    search_path=tuple(sys.path),
                )
                each.pipe.send(job)
            outcomes = self._collect(workers, timeout, grace)
            self._wait_until_clean(workers)
        except BaseException:  # also the timeout of the test itself: the workers' state is unknown now
            self.kill()
            raise
        finally:
            self._calls += 1
            shutil.rmtree(folder, ignore_errors=True)
        if len({outcome.traceback is None for outcome in outcomes}) == 2:
            # Some ranks failed in the middle of what the others finished: do not build on what they left behind.
            self.kill()
        return outcomes

    def _start(self, count: int) -> None:
        if any(each.ended() for each in self._workers):
            self.kill()
        new = [self._spawn(rank) for rank in range(len(self._workers), count)]
        self._workers += new
        deadline = time.monotonic() + START_TIMEOUT
        for each in new:
            if not each.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise WorkersFailedError(f"a worker did not start in {START_TIMEOUT:.0f} s")
            try:
                each.pipe.recv()
            except EOFError:
                raise WorkersFailedError(f"a worker died while it started\n{self._output()}") from None

    def _spawn(self, rank: int) -> _Worker:
        here, there = self._context.Pipe()
        stacks = self._root / f"stacks-{rank}.txt"
        process = self._context.Process(
            target=worker.serve,
            args=(there, str(stacks), str(self._log(rank)), ENVIRONMENT),
            name=f"pool-worker-{rank}",
        )
        start_importing()
        process.start()
        there.close()
        return _Worker(process, here, stacks)

    def _collect(self, workers: list[_Worker], timeout: float, grace: float) -> list[Outcome]:
        """Returns the outcome of each rank, or raises if one of them does not come."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(workers):
            waiting = {each.pipe: rank for rank, each in enumerate(workers) if rank not in outcomes}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._hung(workers, outcomes, timeout)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    outcome = workers[rank].pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise self._died(workers, rank) from None
                outcomes[rank] = outcome
                if outcome.traceback is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[rank] for rank in range(len(workers))]

    def _wait_until_clean(self, workers: list[_Worker]) -> None:
        """Waits until every worker is ready for the next job; one that is not clean is replaced with the rest."""
        deadline = time.monotonic() + CLEAN_TIMEOUT
        for each in workers:
            try:
                answer = each.pipe.recv() if each.pipe.poll(max(0.0, deadline - time.monotonic())) else None
            except (EOFError, ConnectionResetError):
                answer = None
            if not isinstance(answer, Cleaned) or answer.threads > MOST_THREADS:
                self.kill()
                return

    def _hung(self, workers: list[_Worker], outcomes: dict[int, Outcome], timeout: float) -> BaseException:
        """Returns the error for ranks that did not end: the first failure if there is one, and where the rest are."""
        stuck = [rank for rank in range(len(workers)) if rank not in outcomes]
        stacks = self._stacks(workers, stuck)
        failed = [outcome for outcome in outcomes.values() if outcome.traceback is not None]
        if failed:
            first = min(failed, key=lambda outcome: outcome.seconds)
            error = _error(first)
            assert error is not None
            error.__cause__ = RemoteTracebackError(
                f"{first.traceback}\nThe ranks {stuck} were still running {GRACE:.0f} s later:\n{stacks}"
            )
            return error
        return WorkersFailedError(
            f"the ranks {stuck} of {len(workers)} did not end in {timeout:.0f} s\n{stacks}\n{self._output()}"
        )

    def _died(self, workers: list[_Worker], dead: int) -> BaseException:
        workers[dead].process.join(5)
        code = workers[dead].process.exitcode
        others = [rank for rank in range(len(workers)) if rank != dead]
        return WorkersFailedError(
            f"the process of rank {dead} died (exit code {code})\n{self._stacks(workers, others)}\n{self._output()}"
        )

    def _stacks(self, workers: list[_Worker], ranks: list[int]) -> str:
        """Returns the Python stacks of these ranks, written by their fault handlers even if they are stuck in C++."""
        for rank in ranks:
            if not workers[rank].ended():
                os.kill(workers[rank].process.pid, signal.SIGUSR1)
        texts = [f"--- rank {rank} is at\n{_settled_text(workers[rank].stacks)}" for rank in ranks]
        return "\n".join(texts)

    def _log(self, rank: int) -> Path:
        return self._root / f"output-{rank}.txt"

    def _output(self, lines: int = 30) -> str:
        """Returns the last lines that each rank printed."""
        texts = []
        for rank in range(len(self._workers)):
            log = self._log(rank)
            last = log.read_text(errors="replace").splitlines()[-lines:] if log.exists() else []
            if last:
                texts.append("\n".join([f"--- rank {rank} printed last", *last]))
        return "\n".join(texts)

    def _store_port(self) -> int:
        """Returns the port of the session's store; this process hosts it, so it outlives every worker."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)


def _values(outcomes: list[Outcome]) -> list[Any]:
    failed = [outcome for outcome in outcomes if outcome.traceback is not None]
    if failed:
        first = min(failed, key=lambda outcome: outcome.seconds)
        error = _error(first)
        assert error is not None
        raise error
    return [pickle.loads(outcome.value) for outcome in outcomes if outcome.value is not None]


def _error(outcome: Outcome) -> BaseException | None:
    """Returns the exception of a rank with its remote traceback as the cause, or None if the rank returned."""
    if outcome.traceback is None:
        return None
    error: BaseException
    if outcome.error is None:
        error = RuntimeError("a rank failed with an exception that cannot be pickled; see the remote traceback")
    else:
        error = pickle.loads(outcome.error)
    error.__cause__ = RemoteTracebackError(outcome.traceback)
    return error


def _settled_text(path: Path, seconds: float = 60.0) -> str:
    """Returns what a fault handler writes, once it has written and stopped: on a busy machine that takes a while."""
    deadline, before = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        time.sleep(0.3)
        text = path.read_text()
        if text and text == before:
            break
        before = text
    return before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
