"""One shape for every message a user must act on: the rule, the values, where they came from, what to change."""

from __future__ import annotations


def message(rule: str, *, got: str, source: str, change: str) -> str:
    """Returns the four parts as one readable paragraph.

    Args:
        rule: what must hold, as a full sentence.
        got: the values that break it.
        source: where those values came from (an argument, a batch, a file).
        change: what the reader can do about it.
    """
    return f"{rule}\n  Got: {got}\n  From: {source}\n  Change: {change}"
