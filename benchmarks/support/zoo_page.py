"""The zoo's results as a page."""

from __future__ import annotations

from benchmarks.support.zoo_rows import Row


def page(rows: list[Row], everything: dict[str, list[str]]) -> str:
    return "\n".join(row.line() for row in rows)
