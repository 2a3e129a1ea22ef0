"""The messages between the test process and its workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One call of one function on one rank."""

    payload: bytes
    """Pickled ``(function, args)``: unpickled on the worker, where a failing import can be reported."""
    rank: int
    world_size: int
    num_nodes: int
    process_group: bool
    """Whether the worker makes the default process group before the call."""
    call: int
    """Number of the call in this session: the prefix of its keys in the store."""
    store_port: int
    main_port: int
    """A free port, for functions that make the default process group themselves."""
    folder: str
    """Working directory of the call, the same on every rank."""
    log: str
    """Where this rank's standard output and standard error go."""
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What one rank's call came to."""

    seconds: float
    """When the call ended, on the machine's monotonic clock: tells which rank failed first."""
    value: bytes | None = None
    """The pickled return value."""
    error: bytes | None = None
    """The pickled exception, if it failed with one that can be pickled."""
    traceback: str | None = None
    """The remote traceback, if it failed."""


@dataclass(frozen=True)
class Cleaned:
    """The worker has put its process back into its first state and waits for the next job."""

    threads: int = 1
    """How many threads the process has by now."""
