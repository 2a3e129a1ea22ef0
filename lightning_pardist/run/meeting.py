"""Ranks that wait for each other by name: who did not come is told, on every rank that did.

Through the key-value store of the launcher, not by a collective: a collective that waits for a missing rank can only
say that it waited.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_pardist.base.errors import message

_POLL_S: Final = 0.05
TCPStore = dist.TCPStore  # type: ignore[attr-defined]  # public in the documentation, not in the annotations
_kept: list[Store] = []
"""The store lives as long as the process: rank 0's end of it serves the other ranks."""


class RanksMissingError(RuntimeError):
    """Some ranks did not come in time."""


def meet(address: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Returns once every rank has called it; must come before the default process group is made.

    Args:
        address: of the host of rank 0, or of the launcher's agent.
        port: where the launcher wants the ranks to meet.
        rank: this rank.
        world_size: how many are expected.
        timeout_s: longest wait.

    Raises:
        RanksMissingError: on every rank that came, with the ranks that did not.
    """
    deadline = time.monotonic() + timeout_s
    # torchrun's agent hosts the store already, and says so.
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            address,
            port,
            is_master=hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # torch makes its own store at this port right after
        )
    except (RuntimeError, ValueError) as error:
        raise _missing([0], [], address, port, timeout_s, f"nobody listens there ({_first_line(error)})") from error
    _kept.append(store)
    # A restarted run finds the keys of the attempt before in the agent's store.
    prefix = f"pardist/came/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{prefix}/{rank}", socket.gethostname())
    absent = wait_for_keys(store, {other: f"{prefix}/{other}" for other in range(world_size)}, deadline)
    if absent:
        came = [f"{r} ({_text(store, f'{prefix}/{r}')})" for r in range(world_size) if r not in absent]
        raise _missing(absent, came, address, port, timeout_s, "")


def wait_for_keys(store: Store, keys: dict[int, str], deadline: float) -> list[int]:
    """Returns the ranks whose key was not set before ``deadline`` (``time.monotonic``); an empty list if all were."""
    absent = list(keys)
    while True:
        absent = [rank for rank in absent if not store.check([keys[rank]])]
        if not absent or time.monotonic() > deadline:
            return absent
        time.sleep(_POLL_S)


def _text(store: Store, key: str) -> str:
    return store.get(key).decode(errors="replace")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _missing(
    absent: list[int], came: list[str], address: str, port: int, timeout_s: float, why: str
) -> RanksMissingError:
    return RanksMissingError(
        message(
            f"All ranks must come within {timeout_s:g} s.",
            got=f"rank(s) {', '.join(map(str, absent))} did not come to {address}:{port}"
            + (f"; came: {', '.join(came)}" if came else "")
            + (f"; {why}" if why else ""),
            source="the launcher's WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and DiagnosisOptions(start_timeout_s=...)",
            change="look at the missing ranks' output; see that their nodes reach this port (docs/launch.md)",
        )
    )
