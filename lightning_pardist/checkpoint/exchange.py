"""Agreement between ranks: small host messages in a star around rank 0, every wait bounded.

A star, because a rank then depends on rank 0 only: when one rank dies, rank 0 notices and the others still get an
answer, where a collective would leave them in a half-finished tree.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.base.errors import message

T = TypeVar("T")
R = TypeVar("R")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """What lies in storage is not what was written: another, older checkpoint may still be good."""


_SAME_ON_ALL_RANKS: tuple[type[Exception], ...] = (
    CorruptCheckpointError,
    CheckpointError,
    FileNotFoundError,
    ValueError,
)


@dataclass(frozen=True)
class ToAll(Generic[R]):
    """One answer for every rank."""

    value: R


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: type[Exception]
    text: str


class Exchange:
    """The ranks of one process group, or this process alone if ``group`` is None."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float = 1800.0) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def round(self, what: str, local: Callable[[], T], decide: Callable[[list[T]], ToAll[R] | list[R]]) -> R:
        """Returns rank 0's decision about what every rank's ``local`` returned.

        Args:
            what: names the step in errors, as in "writing the files".
            local: runs on every rank; may raise.
            decide: runs on rank 0 with all results in rank order; gives one answer for all or one per rank.

        Raises:
            ValueError, FileNotFoundError, CheckpointError: on ALL ranks, if any rank's ``local``, or ``decide``, raised
                or a rank is lost. The first three kinds keep their type, anything else becomes a CheckpointError.
        """
        if self.world_size == 1:
            return _answers(decide([local()]), 1)[0]
        cause: Exception | None = None
        outcome: Any
        try:
            outcome = local()
        except Exception as error:
            cause, outcome = error, _failure(self.rank, error)
        answer = self._lead(outcome, decide) if self.rank == 0 else self._follow(outcome)
        if isinstance(answer, list) and answer and isinstance(answer[0], _Failure):
            raise _joint_error(what, answer) from cause
        return answer

    def share(self, what: str, local: Callable[[], R]) -> R:
        """Returns what rank 0's ``local`` returned, on every rank; the other ranks' ``local`` is not called."""
        mine: Callable[[], R | None] = local if self.rank == 0 else lambda: None
        return self.round(what, mine, lambda results: ToAll(results[0]))  # type: ignore[return-value]

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a contiguous host tensor."""
        work = dist.isend(_as_bytes(tensor), group=self.group, group_dst=to)
        assert work is not None
        work.wait(timedelta(seconds=self.timeout_s))

    def receive(self, tensor: Tensor, source: int, timeout_s: float | None = None) -> None:
        """Fills a contiguous host tensor."""
        work = dist.irecv(_as_bytes(tensor), group=self.group, group_src=source)
        assert work is not None
        work.wait(timedelta(seconds=max(timeout_s or self.timeout_s, 0.001)))

    def _lead(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        outcomes = [mine]
        deadline = time.monotonic() + self.timeout_s
        for rank in range(1, self.world_size):
            try:
                outcomes.append(self._receive_object(rank, deadline - time.monotonic()))
            except RuntimeError as error:  # what gloo raises for a closed connection and for a wait that is over
                outcomes.append(_Failure(rank, CheckpointError, f"did not answer: {_first_line(error)}"))
        failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
        answers: list[Any] = []
        if not failures:
            try:
                answers = _answers(decide(outcomes), self.world_size)
            except Exception as error:
                failures = [_failure(0, error)]
        if failures:
            answers = [failures] * self.world_size
        packed: dict[int, bytes] = {}
        for rank in range(1, self.world_size):
            payload = packed.setdefault(id(answers[rank]), pickle.dumps(answers[rank]))
            try:
                self._send_bytes(payload, rank)
            except RuntimeError as error:
                failures = failures or [_Failure(rank, CheckpointError, f"was lost: {_first_line(error)}")]
        return failures or answers[0]

    def _follow(self, outcome: Any) -> Any:
        try:
            self._send_bytes(pickle.dumps(outcome), 0)
            # Rank 0 may itself wait for a slower rank, so its answer gets twice the time plus a margin.
            return self._receive_object(0, 2 * self.timeout_s + 10)
        except RuntimeError as error:
            return [_Failure(0, CheckpointError, f"did not answer: {_first_line(error)}")]

    def _send_bytes(self, payload: bytes, to: int) -> None:
        self.send(torch.tensor([len(payload)], dtype=torch.int64), to)
        self.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to)

    def _receive_object(self, source: int, timeout_s: float) -> Any:
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size, source, max(timeout_s, 0.001))
        payload = torch.empty(int(size), dtype=torch.uint8)
        self.receive(payload, source)
        return pickle.loads(payload.numpy().tobytes())


def _as_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return tensor.detach().reshape(-1).view(torch.uint8)


def _answers(decision: ToAll[R] | list[R], world_size: int) -> list[R]:
    if isinstance(decision, ToAll):
        return [decision.value] * world_size
    assert len(decision) == world_size
    return decision


def _failure(rank: int, error: Exception) -> _Failure:
    for kind in _SAME_ON_ALL_RANKS:
        if isinstance(error, kind):
            return _Failure(rank, kind, str(error))
    return _Failure(rank, CheckpointError, f"{type(error).__name__}: {error}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _joint_error(what: str, failures: list[_Failure]) -> Exception:
    first = failures[0]
    if first.kind is not CheckpointError and all(failure.kind is first.kind for failure in failures):
        return first.kind(first.text)
    if len(failures) == 1 and "\n  Got:" in first.text:
        return first.kind(first.text)
    return CheckpointError(
        message(
            f"Every rank must succeed in {what}; all ranks stop here together.",
            got="; ".join(f"rank {failure.rank} {_first_line(Exception(failure.text))}" for failure in failures[:8]),
            source="the ranks' own reports to rank 0",
            change="mend the first cause named above; a checkpoint that was complete before is untouched",
        )
    )
