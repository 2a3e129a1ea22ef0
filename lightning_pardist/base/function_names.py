"""Plain names of torch functions, as a ``TorchFunctionMode`` sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPERATORS = {
    "radd": "add", "iadd": "add", "rsub": "sub", "isub": "sub", "rmul": "mul", "imul": "mul", "truediv": "div",
    "rtruediv": "div", "itruediv": "div", "rpow": "pow", "ipow": "pow", "rmatmul": "matmul", "imatmul": "matmul",
    "rdiv": "div", "idiv": "div",
}  # fmt: skip

CONTRACTIONS = frozenset(
    "linear matmul bmm mm mv rmatmul addmm baddbmm einsum grouped_mm _grouped_mm grouped_mm_fallback".split()
)
"""Functions that a linear layer may be written with; ``grouped_mm`` is one of many experts at once."""


def function_name(func: Callable[..., Any]) -> str:
    """Returns the function's plain name: ``add`` for ``torch.add``, ``Tensor.add_`` and ``Tensor.__radd__``."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":  # a property of Tensor, such as T
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return _OPERATORS.get(name, name)
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name
