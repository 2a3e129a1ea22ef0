"""Values that a fake tensor has after all: those computed from the batch and from buffers alone.

The sample batch is real, so a mask's ``all()``, a longest length, the rows that ``nonzero`` finds in labels are facts,
not guesses. For every fake tensor made from facts only, the operator and its arguments are noted; nothing is computed
until a value is asked for, and then for real, on the CPU, without touching the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_pardist.base.nested import map_arguments, tensors_in
from lightning_pardist.base.torch_api import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    storage_key,
    without_dispatch_modes,
    written_arguments,
)
from lightning_pardist.describe.blame import asking_line

aten = torch.ops.aten

_MOST_ELEMENTS = 1 << 26
"""Tensors with more elements are not evaluated: a value that needs them counts as unknown."""
_UNDEFINED = ("empty", "new_empty", "rand", "normal", "bernoulli", "multinomial", "dropout")
"""Starts of operator names whose result is no function of their arguments."""


class Fact:
    """How to compute one tensor's value: an operator on other facts, or the value itself."""

    __slots__ = ("args", "func", "index", "kwargs", "numel", "value")

    def __init__(self, value: torch.Tensor | None = None, *, numel: int = 0) -> None:
        self.value = value
        self.numel = numel if value is None else value.numel()
        self.func: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.index: int | None = None

    def evaluate(self) -> torch.Tensor:
        """Returns the value, computed once."""
        if self.value is None:
            assert self.func is not None
            if self.numel > _MOST_ELEMENTS:
                raise OverflowError(self.numel)
            result = self.func(*map_arguments(_value, self.args), **map_arguments(_value, self.kwargs))
            self.value = result if self.index is None else result[self.index]
        return self.value


class KnownValues:
    """The facts about the fake tensors of one run."""

    def __init__(self, mode: FakeTensorMode, assume: Callable[[str], None]) -> None:
        """Starts with no facts.

        Args:
            mode: the fake mode of the run.
            assume: told what is taken for granted.
        """
        self._mode = mode
        self._assume = assume
        self._facts: dict[int, tuple[torch.Tensor, Fact]] = {}
        self._by_storage: dict[int, set[int]] = {}

    def declare(self, fake: torch.Tensor, fact: Fact) -> None:
        """Notes what ``fake`` holds."""
        self._facts[id(fake)] = (fake, fact)
        self._by_storage.setdefault(storage_key(fake), set()).add(id(fake))

    def forget_all(self) -> None:
        """Lets go of every tensor."""
        self._facts.clear()
        self._by_storage.clear()

    def declare_full(self, fake: torch.Tensor, element: bool | float) -> None:
        """Notes that every element of ``fake`` is ``element``."""
        with without_dispatch_modes():
            self.declare(fake, Fact(torch.full((), element, dtype=fake.dtype).expand(fake.shape)))

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns True if the value of the fake tensor is known (or can be computed)."""
        return self._fact(tensor) is not None

    def ask(self, tensor: torch.Tensor, question: Callable[[torch.Tensor], Any]) -> Any | None:
        """Returns ``question`` of the real value of a fake tensor, or None if the value is not known."""
        fact = self._fact(tensor)
        return None if fact is None else self._compute(lambda: question(fact.evaluate()))

    def result(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Returns the real result of an operator whose tensor arguments are all known, else None."""
        tensors = list(tensors_in((args, kwargs)))
        if not tensors or any(self._fact(tensor) is None for tensor in tensors):
            return None

        def run() -> Any:
            arguments = map_arguments(self._fact_of_leaf, (args, _on_cpu(kwargs)))
            positional, named = map_arguments(_value, arguments)
            return func(*positional, **named)

        return self._compute(run)

    def adopt(self, real: Any) -> Any:
        """Returns real tensors as fake ones whose values are known."""
        if isinstance(real, (tuple, list)):
            return type(real)([self.adopt(item) for item in real])
        if not isinstance(real, torch.Tensor):
            return real
        fake = self._mode.from_tensor(real, static_shapes=True)
        self.declare(fake, Fact(real))
        return fake

    def note(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Notes the outputs of one operator call as facts if its inputs are, and forgets what it overwrote."""
        written = written_arguments(func, args, kwargs)
        if written:
            after = self._after_writing(func, args, kwargs, written)
            for tensor in tensors_in(written):
                self._forget(tensor)
            if after is not None:
                self.declare(args[0], after)
            return
        if func.overloadpacket is aten.rand and isinstance(out, torch.Tensor) and out.numel() == 1:
            # One uniform number is drawn to decide something (whether to drop a layer): take the likelier side.
            self._assume(f"a uniform random number drawn at {asking_line()} was taken as its median, 0.5")
            self.declare_full(out, 0.5)
            return
        if func.name().split("::")[1].startswith(_UNDEFINED) or torch.Tag.nondeterministic_seeded in func.tags:
            return
        if any(self._fact(tensor) is None for tensor in tensors_in((args, kwargs))):
            return
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        known_args, known_kwargs = map_arguments(self._fact_of_leaf, (tuple(args), _on_cpu(kwargs)))
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._facts:
                fact = Fact(numel=tensor.numel())
                fact.func, fact.args, fact.kwargs = func, known_args, known_kwargs
                fact.index = index if isinstance(out, (tuple, list)) else None
                self.declare(tensor, fact)

    def _after_writing(self, func: OpOverload, args: Any, kwargs: Any, written: list[Any]) -> Fact | None:
        """Returns what a tensor holds after an operator on itself (``masked_fill_``) of which everything is known."""
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or len(written) != 1 or written[0] is not target:
            return None
        if func.name().split("::")[1].startswith(_UNDEFINED) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        alone = len(self._by_storage.get(storage_key(target), ())) <= 1  # no view of it is left that would change too
        if not alone or any(self._fact(tensor) is None for tensor in tensors_in((args, kwargs))):
            return None
        fact = Fact(numel=target.numel())
        fact.func = lambda first, *others, **named: func(first.clone(), *others, **named)
        fact.args, fact.kwargs = map_arguments(self._fact_of_leaf, (tuple(args), _on_cpu(kwargs)))
        return fact

    def _forget(self, written: torch.Tensor) -> None:
        # Every view of the storage changed with it. Facts made from it before hold the old value, as they should.
        for key in self._by_storage.pop(storage_key(written), ()):
            self._facts.pop(key, None)

    def _fact(self, tensor: torch.Tensor) -> Fact | None:
        known = self._facts.get(id(tensor))
        if known is not None:
            return known[1]
        if isinstance(tensor, (FakeTensor, torch.nn.Parameter)) or tensor.is_meta:
            return None
        return Fact(tensor)  # a real tensor that user code holds outside the module

    def _fact_of_leaf(self, value: Any) -> Any:
        return self._fact(value) if isinstance(value, torch.Tensor) else value

    def _compute(self, run: Callable[[], Any]) -> Any:
        autocast_off = torch.autocast("cpu", enabled=False)
        try:
            with without_dispatch_modes(), torch.no_grad(), autocast_off:
                return run()
        except Exception:  # what cannot be computed is not known; the caller then says that it is not
            return None


def _value(item: Any) -> Any:
    return item.evaluate().cpu() if isinstance(item, Fact) else item


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
