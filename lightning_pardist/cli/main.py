"""The entrance of the ``pardist`` command: one subcommand per module of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser, Namespace

from lightning_pardist.cli import checkpoint, doctor, plan

_COMMANDS: dict[str, tuple[Callable[[ArgumentParser], None], Callable[[Namespace], None], str]] = {
    "plan": (plan.add_commands, plan.run, "foretell what a training will take on a cluster"),
    "doctor": (doctor.add_commands, doctor.run, "check machine and links, with bounded collectives on every axis"),
    "checkpoint": (checkpoint.add_commands, checkpoint.run, "look at, check and convert checkpoints"),
}
"""Word, what adds its arguments, what does it, one line of help."""


def build_parser() -> ArgumentParser:
    """Returns the parser of the whole command."""
    parser = ArgumentParser(prog="pardist", description="Tools around lightning_pardist.")
    subcommands = parser.add_subcommands(dest="command")
    for name, (add_commands, _, text) in _COMMANDS.items():
        command = ArgumentParser(description=text)
        subcommands.add_subcommand(name, command, help=text)
        add_commands(command)  # after: jsonargparse wants the outer level first
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0 if all went well, 1 with the reason on stderr if not."""
    parsed = build_parser().parse_args(arguments)
    try:
        _COMMANDS[parsed.command][1](parsed[parsed.command])
    except (ValueError, RuntimeError, OSError) as error:
        print(f"pardist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
