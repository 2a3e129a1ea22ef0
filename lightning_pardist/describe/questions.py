"""Answers to Python code that asks a fake tensor for its value.

Three answers are possible, in this order: the value is known (it comes from the batch alone); the value does not
matter, because the code only computes with it, as logging does; or nobody can answer, and the run ends at that line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pardist.base.torch_api import FakeTensor
from lightning_pardist.describe.blame import asking_line
from lightning_pardist.describe.known_values import KnownValues


class UnknownValueError(RuntimeError):
    """Code decides by a value that a fake tensor does not have."""


def _refuse(what: str) -> NoReturn:
    raise UnknownValueError(f"the code decides by {what}, which only a real run knows")


class UnknownNumber(float):
    """A number that nobody knows: code may compute with it, print it and pass it on, but not decide by it."""

    def __new__(cls) -> UnknownNumber:
        # 1.0 is finite, and neither log nor division fail on it.
        return super().__new__(cls, 1.0)

    def __repr__(self) -> str:
        return "<unknown>"

    def _combine(self, *others: object) -> Any:
        known = all(isinstance(other, (int, float)) or other is None for other in others)
        return UnknownNumber() if known else NotImplemented

    def _decide(self, *others: object) -> NoReturn:
        _refuse("a number read from a tensor")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _combine
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _combine
    __round__ = _combine
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = __trunc__ = _decide
    __floor__ = __ceil__ = __index__ = _decide
    __hash__ = float.__hash__


_FINITE_TESTS = {torch.isnan: False, Tensor.isnan: False, torch.isinf: False, Tensor.isinf: False,
                 torch.isneginf: False, Tensor.isneginf: False, torch.isposinf: False, Tensor.isposinf: False,
                 torch.isfinite: True, Tensor.isfinite: True}  # fmt: skip


class Questions(TorchFunctionMode):
    """Active during the fake run: catches every way in which code reads a tensor's value."""

    def __init__(self, known: KnownValues, assume: Callable[[str], None]) -> None:
        super().__init__()
        self._known = known
        self._assume = assume
        self._answers: dict[Any, Callable[[Tensor], Any]] = {
            Tensor.item: self._item,
            Tensor.__bool__: self._bool,
            Tensor.is_nonzero: self._bool,
            torch.is_nonzero: self._bool,
            Tensor.__float__: self._float,
            Tensor.__int__: self._integer,
            Tensor.__index__: self._integer,
            Tensor.tolist: self._list,
            Tensor.numpy: self._array,
            Tensor.__array__: self._array,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.get(func)
        if answer is not None and isinstance(args[0], FakeTensor):
            return answer(args[0])
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor) and self._known.ask(args[0], bool) is None:
            return repr(UnknownNumber())
        out = func(*args, **(kwargs or {}))
        if func in _FINITE_TESTS and isinstance(out, FakeTensor):
            self._assume_finite(out, _FINITE_TESTS[func])
        return out

    def _item(self, tensor: Tensor) -> Any:
        value = self._known.ask(tensor, Tensor.item)
        if value is not None:
            return value
        if tensor.numel() != 1 or tensor.dtype.is_complex:
            _refuse("the values of a tensor")
        self._assume(f"a number read from a tensor at {asking_line()} was taken as unknown")
        return UnknownNumber()

    def _float(self, tensor: Tensor) -> float:
        value = self._known.ask(tensor, float)
        if value is not None:
            return value
        # Python wants an exact float here, so a later decision by this number cannot be caught: it is told instead.
        self._assume(f"float(tensor) at {asking_line()} was taken as 1.0")
        return 1.0

    def _bool(self, tensor: Tensor) -> bool:
        return self._require(tensor, bool, "the truth of a tensor")

    def _integer(self, tensor: Tensor) -> int:
        return self._require(tensor, int, "an integer read from a tensor")

    def _list(self, tensor: Tensor) -> Any:
        return self._require(tensor, Tensor.tolist, "the values of a tensor")

    def _array(self, tensor: Tensor) -> Any:
        return self._require(tensor, Tensor.numpy, "the values of a tensor")

    def _require(self, tensor: Tensor, question: Callable[[Tensor], Any], what: str) -> Any:
        value = self._known.ask(tensor, question)
        if value is None:
            _refuse(what)
        return value

    def _assume_finite(self, out: Tensor, answer: bool) -> None:
        if not self._known.has(out):
            self._known.declare_full(out, answer)
            self._assume(f"values tested for NaN or infinity at {asking_line()} were taken as finite")
