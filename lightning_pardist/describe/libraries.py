"""Libraries that ask whether a tensor is fake, and then leave out what a real step would do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def libraries_ask_for_fakes() -> bool:
    """Returns True if a library is loaded whose models look for fake tensors."""
    return _transformers() is not None


@contextmanager
def fakes_pass_for_real() -> Iterator[None]:
    """Lets the models of transformers take the path of a real step in this context.

    ``transformers.utils.import_utils.is_tracing`` counts a fake tensor as tracing. Its models then build masks that a
    real step drops (an attention mask of ones, say), so costs would not be those of a real step. We can answer what
    they look at, as the batch is real.
    """
    library = _transformers()
    if library is None:
        yield
        return
    before = library.is_fake_tensor
    library.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        library.is_fake_tensor = before


def _transformers() -> Any | None:
    library = sys.modules.get("transformers.utils.import_utils")
    return library if hasattr(library, "is_fake_tensor") else None
