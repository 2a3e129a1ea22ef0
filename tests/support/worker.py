"""The life of one worker process of the pool: set up, call, answer, clean, wait."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.support.jobs import Cleaned, Job, Outcome


def serve(pipe: Connection, stacks: str, log: str, environment: dict[str, str]) -> None:
    """Runs jobs until the other end of the pipe is closed."""
    os.setpgid(0, 0)  # so that the pool can kill what a job started, too
    os.environ.clear()  # that of the process it was forked from
    os.environ.update(environment)
    _send_output_to(log)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        faulthandler.enable(sys.stderr)
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name need not resolve where tests run
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        importlib.import_module("lightning.pytorch")
        pipe.send(Cleaned())
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                job = pipe.recv()
                # Anew for each job: a Trainer that ends puts Python's handlers back, over the fault handler's own.
                faulthandler.unregister(signal.SIGUSR1)
                faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
                _answer(pipe, job)


def _answer(pipe: Connection, job: Job) -> None:
    """Runs one job, tells its outcome at once, and only then cleans up: who failed first is told first."""
    _send_output_to(job.log)
    with _state_kept(), contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_as_rank(job))
            function, args = pickle.loads(job.payload)
            outcome = Outcome(time.monotonic(), value=pickle.dumps(function(*args)))
        except BaseException as error:
            outcome = _failure(error)
        pipe.send(outcome)
        del outcome
        function = args = None
    pipe.send(Cleaned(threads=_threads()))


def _failure(error: BaseException) -> Outcome:
    seconds = time.monotonic()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # some exceptions pickle, and cannot be made again
    except Exception:
        return Outcome(seconds, traceback=text)
    return Outcome(seconds, error=pickled, traceback=text)


@contextlib.contextmanager
def _as_rank(job: Job) -> Iterator[None]:
    """Makes this process the rank of the job: environment, folder, seeds, Lightning's rank, process group."""
    import torch.distributed as dist
    from lightning.pytorch.utilities import rank_zero_only

    for entry in job.search_path:
        if entry not in sys.path:
            sys.path.append(entry)
    os.chdir(job.folder)
    os.environ.update(_launcher_variables(job))
    rank_zero_only.rank = job.rank
    _seed(1234 + job.rank)
    if job.process_group:
        store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call{job.call}", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=datetime.timedelta(minutes=10),  # the pool's own timeout comes first and tells more
        )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _launcher_variables(job: Job) -> dict[str, str]:
    """Returns what torchrun would set; nothing for one rank without a process group."""
    if job.world_size == 1 and not job.process_group:
        return {}
    per_node = job.world_size // job.num_nodes
    return {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank % per_node),
        "NODE_RANK": str(job.rank // per_node),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.main_port),
    }


@contextlib.contextmanager
def _state_kept() -> Iterator[None]:
    """Puts back what a test may have changed in this process."""
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    environment, folder = dict(os.environ), os.getcwd()
    default_dtype, filters = torch.get_default_dtype(), warnings.filters[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        warnings.filters[:] = filters
        for number, handler in handlers.items():
            signal.signal(number, handler)
        rank_zero_only.rank = 0
        torch.set_default_dtype(default_dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        _forget_meshes()
        gc.collect()


def _forget_meshes() -> None:
    """Drops what torch remembers about meshes: the names of their process groups are those of the last call."""
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()
    if "lightning_pardist.mesh" in sys.modules:
        sys.modules["lightning_pardist.mesh"]._shared.clear()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def _threads() -> int:
    """Returns the number of this process's threads, those of C++ included, where the system tells."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _send_output_to(log: str) -> None:
    """Starts the log afresh and makes it this process's standard output and standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a rank that hangs has printed must be in the log


def _leave_with_parent() -> None:
    """Ends this process when the test process is gone, even in the middle of a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
