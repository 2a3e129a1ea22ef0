"""Which call of which running module this is: calls that speak of whole sizes are known by their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.specs.tensor_plan import TensorPlan
from lightning_pardist.specs.tensor_roles import ShardCall


@dataclass
class _Counted:
    """The calls of one module that the plan speaks of."""

    calls: dict[tuple[str, int], ShardCall] = field(default_factory=dict)
    names: frozenset[str] = frozenset()


@dataclass
class _Scope:
    """One running forward of a module whose calls are counted."""

    of: _Counted
    is_outermost: bool
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class _Running:
    """What runs in one thread."""

    depth: int = 0
    scopes: list[_Scope] = field(default_factory=list)


class CallScopes:
    """Counts the calls of functions in running modules.

    A block that is recomputed in the backward pass runs outside of steps, perhaps in a thread of autograd's: the mode
    is then active for as long as the outermost watched module runs.
    """

    def __init__(self, mode: TorchFunctionMode, at_end: Callable[[], None]) -> None:
        """Starts with nothing watched.

        Args:
            mode: made active around modules that run outside of steps.
            at_end: called when such a module has ended.
        """
        self._mode = mode
        self._at_end = at_end
        self._counted: dict[str, _Counted] = {}
        self._running = threading.local()

    def install(self, model: ParallelModel, plan: TensorPlan) -> list[RemovableHandle]:
        """Watches modules whose calls the plan counts, or whose code may be recomputed; returns the hooks' handles."""
        for call in plan.calls:
            found = self._counted.setdefault(call.module, _Counted())
            found.calls[call.function, call.ordinal] = call
        for found in self._counted.values():
            found.names = frozenset(function for function, _ in found.calls)
        # Blocks, and whatever holds a sharded weight: code of theirs may be recomputed in the backward pass.
        blocks = [block.name for block in model.profile.blocks()] if model.profile is not None else []
        owners = [layout.parameter.rpartition(".")[0] for layout in plan.layouts]
        watched = dict.fromkeys([*self._counted, *plan.quiet_modules, *filter(None, [*blocks, *owners])])
        return [handle for name in watched for handle in self._watch(model.module.get_submodule(name), name)]

    def _watch(self, module: nn.Module, name: str) -> tuple[RemovableHandle, RemovableHandle]:
        return (
            module.register_forward_pre_hook(lambda *_: self._enter(name)),
            module.register_forward_hook(lambda *_: self._leave(), always_call=True),
        )

    def next_call(self, function: str) -> ShardCall | None:
        """Counts a call of a function in the module that runs; returns what the plan says of it, if anything."""
        scopes = self._here().scopes
        if not scopes:
            return None
        scope = scopes[-1]
        if function not in scope.of.names:
            return None
        ordinal = scope.counts.get(function, 0)
        scope.counts[function] = ordinal + 1
        return scope.of.calls.get((function, ordinal))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Is entered around a step, in which the mode is active anyway."""
        here = self._here()
        here.depth += 1
        before, here.scopes = here.scopes, []
        try:
            yield
        finally:
            here.depth -= 1
            here.scopes = before

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Is entered around code of a module that runs without the module's hooks."""
        self._enter(module)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, module: str) -> None:
        here = self._here()
        here.scopes.append(_Scope(self._counted.get(module) or _Counted(), is_outermost=here.depth == 0))
        if here.depth == 0:
            here.depth += 1
            self._mode.__enter__()

    def _leave(self) -> None:
        here = self._here()
        if here.scopes and here.scopes.pop().is_outermost:
            here.depth -= 1
            self._mode.__exit__(None, None, None)
            self._at_end()

    def _here(self) -> _Running:
        found: Any = getattr(self._running, "found", None)
        if found is None:
            found = self._running.found = _Running()
        assert isinstance(found, _Running)
        return found
