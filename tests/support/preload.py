"""What every worker imports sooner or later: imported once, by the process that the workers are forked from.

An import of torch, Lightning and transformers takes seconds of a core; a fork takes milliseconds. Nothing here may
start a thread, run an operator of torch or make a process group: a fork would not carry them over.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading

MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "lightning.pytorch",
    "lightning_pardist.checkpoint",
    "lightning_pardist.strategies.hybrid",
)
OPTIONAL = ("transformers.models.llama.modeling_llama",)
"""What the tests skip where it is not installed."""


def load() -> None:
    for name in MODULES:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    gc.collect()
    gc.freeze()  # the collector must neither walk nor copy, in every worker and call, what none of them will free


load()
