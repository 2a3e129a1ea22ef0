"""Counts what a user writes or changes: a program's lines that the same program for one process does not have.

The count needs no marks that could be set in one's favour: a program is its function, every function and class of its
file that it uses, and the imports of these; the difference to the one-process program is taken line by line. Blank
lines, comments and docstrings do not count, nor lines that end in ``# not counted``: these serve the benchmark. How
long a line is, the formatter decides for all alike.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

NOT_COUNTED = "# not counted"


def lines_to_write(program: Callable[..., Any], one_process: Callable[..., Any]) -> list[str]:
    """Returns the lines of a program that are new or changed against another, in their order.

    A line that goes and has none in its place counts as well, and comes with a minus before it.
    """
    old, new = program_lines(one_process), program_lines(program)
    found = []
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "delete":
            found += [f"-{line}" for line in old[i:j]]
        elif tag != "equal":
            found += new[k:m]
    return found


def program_lines(program: Callable[..., Any]) -> list[str]:
    """Returns the imports, helpers and body of a program as lines of code."""
    module = inspect.getmodule(program)
    assert module is not None
    parts = _with_helpers(program, module)
    text = [line for part in parts for line in _code(inspect.getsource(part))]
    names = {name for part in parts for name in _names(inspect.getsource(part))}
    # The name of the function itself is the benchmark's.
    text = [line.replace(f"def {program.__name__}(", "def train(") for line in text]
    return [*_imports(module, names), *text]


def _with_helpers(program: Callable[..., Any], module: ModuleType) -> list[Any]:
    found, waiting = [], [program]
    while waiting:
        part = waiting.pop()
        if part in found:
            continue
        found.append(part)
        for name in _names("\n".join(_code(inspect.getsource(part)))):
            helper = getattr(module, name, None)
            if inspect.getmodule(helper) is module and (inspect.isfunction(helper) or inspect.isclass(helper)):
                waiting.append(helper)
    return sorted(found, key=lambda part: inspect.getsourcelines(part)[1])


def _code(source: str) -> Iterator[str]:
    documented = _docstring_lines(source)
    for number, line in enumerate(source.splitlines(), start=1):
        code = line.strip()
        if code and not code.startswith("#") and not code.endswith(NOT_COUNTED) and number not in documented:
            yield line.rstrip()


def _docstring_lines(source: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def _names(source: str) -> list[str]:
    names = (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(names))


def _imports(module: ModuleType, names: set[str]) -> list[str]:
    """Returns one line per module imported from, with the names that are used."""
    lines = []
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        node.names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in names]
        if node.names:
            lines.append(ast.unparse(node))
    return lines
