"""Switches dropout off and leaves everything else as in training, so that two runs can be compared by numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_pardist.base.function_names import function_name
from lightning_pardist.run.attention import attention_arguments

_DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout".split()
)


class NoDropout(TorchFunctionMode):
    """Active in a step: what dropout functions are given comes back as it is."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function_name(func)
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        elif name == "multi_head_attention_forward":
            return func(**{**attention_arguments(args, kwargs), "dropout_p": 0.0})
        return func(*args, **kwargs)
