"""What some tests need that is not there on every machine, and why they are skipped where it is not."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

# The hf extra: the package itself never imports transformers, so that it must install and be tested without it too.
# ``make test`` installs it, and there nothing is skipped.
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
_WHY = "the module under test is one of transformers (the hf extra)"
NEEDS_TRANSFORMERS = (pytest.mark.hf, pytest.mark.skipif(not HAS_TRANSFORMERS, reason=_WHY))


def transformers_or_skip() -> Any:
    """Returns the library; for a test, or a file of tests, that is about nothing else."""
    return pytest.importorskip("transformers", reason=_WHY)


# The whole suite is run at every change and must end within minutes. These repeat at length what shorter tests beside
# them do a few times, or wait for time to pass; they are for changes of the code that they are about.
LONG = pytest.mark.skipif(not os.environ.get("PARDIST_LONG_TESTS"), reason="takes minutes; set PARDIST_LONG_TESTS=1")
