"""How long a pipeline schedule takes, and where ranks wait: actions with costs, no communication.

An action starts when its rank is free and what it depends on has ended: F(s, m) on F(s-1, m), B or I(s, m) on
B or I(s+1, m) and on F(s, m), W(s, m) on I(s, m). A forward that is one with the backward after it waits for what
both need, and others see its result when both have ended. The idle share is 1 - busy / (ranks x makespan), as in the
papers on pipeline bubbles (Narayanan et al. 2021, section 2.2; Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pardist.specs.pipeline_plan import Action, Orders

UNIT_COSTS: Mapping[str, float] = {"F": 1.0, "O": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Forward, backward of inputs and backward of weights cost the same."""
_LETTERS = {"F": "abcdefghijklmnopqrstuvwxyz", "B": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "W": "0123456789"}


@dataclass(frozen=True)
class Span:
    """One action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A whole step."""

    spans: Mapping[int, tuple[Span, ...]]
    """By rank, in order."""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    @property
    def idle_share(self) -> float:
        """Share of the ranks' time in which they wait."""
        busy = sum(span.end - span.start for spans in self.spans.values() for span in spans)
        total = self.makespan * len(self.spans)
        return 1.0 - busy / total if total else 0.0

    def most_alive(self, stages_per_rank: int) -> float:
        """Returns how many micro-batches' activations of all its stages the fullest rank keeps at once."""
        most = 0
        for spans in self.spans.values():
            alive = 0
            for span in spans:
                kind = span.action[1]
                alive += {"F": 1, "O": 1, "B": -1, "W": -1}.get(kind, 0)
                most = max(most, alive)
        return most / stages_per_rank

    def lines(self, width: int = 100) -> tuple[str, ...]:
        """Returns one line per rank, one character per unit of time.

        The micro-batch is a small letter in a forward, a capital in a backward, a digit in the backward of weights; a
        dot is waiting.
        """
        scale = max(self.makespan / width, 1.0) if self.makespan else 1.0
        found = []
        for rank in sorted(self.spans):
            cells = ["."] * max(int(self.makespan / scale + 0.5), 1)
            for span in self.spans[rank]:
                _, kind, micro = span.action
                letters = _LETTERS[{"I": "B", "O": "F"}.get(kind, kind)]
                for at in range(int(span.start / scale + 0.5), int(span.end / scale + 0.5)):
                    if at < len(cells):
                        cells[at] = letters[micro % len(letters)]
            found.append("".join(cells))
        return tuple(found)


def simulate(orders: Orders, cost: Callable[[Action], float] | None = None) -> Simulation:
    """Returns when every action runs.

    Args:
        orders: what every rank computes, in order.
        cost: of an action; None for ``UNIT_COSTS``.

    Raises:
        ValueError: if ranks wait for each other in a circle, or for what nobody computes.
    """
    price = cost or (lambda action: UNIT_COSTS[action[1]])
    last_stage = max(stage for actions in orders.values() for stage, _, _ in actions)
    ended: dict[Action, float] = {}
    spans: dict[int, list[Span]] = {rank: [] for rank in orders}
    joint = {rank: _joint(actions) for rank, actions in orders.items()}
    free = dict.fromkeys(orders, 0.0)
    while any(joint.values()):
        progress = False
        for rank, left in joint.items():
            while left:
                ready = [_ready(action, last_stage, ended) for action in left[0]]
                if None in ready:
                    break
                start = max(free[rank], *(at for at in ready if at is not None))
                group = left.pop(0)
                for action in group:
                    spans[rank].append(Span(action, start, start + price(action)))
                    start = spans[rank][-1].end
                free[rank] = start
                ended.update({(stage, "F" if kind == "O" else kind, m): start for stage, kind, m in group})
                progress = True
        if not progress:
            stuck = {rank: left[0][0] for rank, left in joint.items() if left}
            raise ValueError(f"the schedule cannot go on: every rank waits, at {stuck}")
    return Simulation({rank: tuple(found) for rank, found in spans.items()})


def _joint(actions: Sequence[Action]) -> list[list[Action]]:
    """Returns actions one by one, those that are one with the next together with it."""
    found: list[list[Action]] = []
    is_open = False
    for action in actions:
        if is_open:
            found[-1].append(action)
        else:
            found.append([action])
        is_open = action[1] == "O"
    return found


def _ready(action: Action, last_stage: int, ended: Mapping[Action, float]) -> float | None:
    stage, kind, micro = action
    if kind in ("F", "O"):
        return 0.0 if stage == 0 else ended.get((stage - 1, "F", micro))
    if kind == "W":
        return ended.get((stage, "I", micro))
    own = ended.get((stage, "F", micro))
    if own is None or stage == last_stage:
        return own
    above = [ended[key] for k in "BI" if (key := (stage + 1, k, micro)) in ended]
    return max(own, above[0]) if above else None
