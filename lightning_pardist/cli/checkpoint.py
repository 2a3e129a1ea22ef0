"""``pardist checkpoint inspect | verify | consolidate | export``. None needs a process group or a GPU."""

from __future__ import annotations

import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_pardist import checkpoint
from lightning_pardist.checkpoint.export import EXPORT_DTYPES


def add_commands(parser: ArgumentParser) -> None:
    """Adds what ``pardist checkpoint`` can do."""
    commands = parser.add_subcommands(dest="action")
    commands.add_subcommand("inspect", _inspect(), help="say what a checkpoint holds")
    commands.add_subcommand("verify", _verify(), help="compare every byte with the checksums")
    commands.add_subcommand("consolidate", _consolidate(), help="write one ordinary Lightning .ckpt file")
    commands.add_subcommand("export", _export(), help="write the weights as safetensors")


def run(arguments: Namespace) -> None:
    """Does what was asked and prints the result."""
    given = arguments[arguments.action]
    options = given.storage_options
    progress = sys.stderr.isatty() if given.progress is None else given.progress
    if arguments.action == "inspect":
        print(checkpoint.inspect(given.path, storage_options=options).text(tensors=given.tensors))
    elif arguments.action == "verify":
        count = checkpoint.verify(given.path, storage_options=options, progress=progress)
        print(f"{given.path}: complete, {count} bytes are as they were written")
    elif arguments.action == "consolidate":
        checkpoint.consolidate(
            given.source,
            given.destination,
            weights_only=not given.trust,
            storage_options=options,
            progress=progress,
        )
        print(given.destination)
    else:
        names = checkpoint.export(
            given.source,
            given.destination,
            dtype=given.dtype,
            prefix=given.prefix,
            max_shard_bytes=given.max_shard_bytes,
            storage_options=options,
            progress=progress,
        )
        print("\n".join(f"{given.destination}/{name}" for name in names))


def _with_common(made: ArgumentParser) -> ArgumentParser:
    made.add_argument(
        "--storage_options", type=dict[str, Any] | None, default=None, help="options of the fsspec file system"
    )
    made.add_argument("--progress", type=bool | None, default=None, help="show a bar; by default on a terminal only")
    return made


def _inspect() -> ArgumentParser:
    made = ArgumentParser(description="Say what a checkpoint of any kind holds.")
    made.add_argument("path", type=str, help="folder or file")
    made.add_argument("--tensors", action="store_true", help="list every tensor of the model")
    return _with_common(made)


def _verify() -> ArgumentParser:
    made = ArgumentParser(description="Compare every byte of a checkpoint with its checksums.")
    made.add_argument("path", type=str, help="folder")
    return _with_common(made)


def _consolidate() -> ArgumentParser:
    made = ArgumentParser(description="Write one ordinary Lightning .ckpt file, which plain Lightning resumes from.")
    made.add_argument("source", type=str, help="folder or file")
    made.add_argument("destination", type=str, help="the new file")
    made.add_argument("--trust", action="store_true", help="also load pickled objects, which can run code")
    return _with_common(made)


def _export() -> ArgumentParser:
    made = ArgumentParser(description="Write the weights for use elsewhere.")
    made.add_argument("source", type=str, help="folder or file")
    made.add_argument("destination", type=str, help="folder for the files")
    made.add_argument("--safetensors", action="store_true", help="the format; the only one, and the default")
    made.add_argument("--dtype", choices=[*EXPORT_DTYPES], default=None, help="of floating tensors; default: as saved")
    made.add_argument("--prefix", type=str, default="", help="write only names that start so, without it")
    made.add_argument("--max_shard_bytes", type=int, default=5 * 10**9, help="largest size of one file")
    return _with_common(made)
