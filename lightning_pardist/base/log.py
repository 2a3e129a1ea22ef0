"""The package's loggers. Handlers, levels and rank filtering are the application's business."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Returns the logger ``lightning_pardist.<last part of name>``."""
    return logging.getLogger(name)
