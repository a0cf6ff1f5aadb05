"""The command ``xlatrain``.

A subcommand is an object with ``HELP``, one line, and ``main(arguments)``, which returns the exit status. The engine's own are
modules of this package; a package above it adds its own as entry points of the group ``xlatrain.commands``. Listing them
imports neither torch nor JAX.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from xlatrain import __version__

OWN = ("preflight", "launch", "goodput", "doctor", "ckpt", "tpu", "examples", "completion")
GROUP = "xlatrain.commands"
_ORDER = ("fit", "validate", "test", "predict", *OWN)


class Command(Protocol):
    """A subcommand."""

    HELP: str

    def main(self, arguments: Sequence[str]) -> int:
        """Run it with what follows its name on the command line; returns the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``xlatrain <subcommand> …``; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and (command := find(arguments[0])) is not None:
        return command.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="xlatrain", description="PyTorch-Lightning-style training, compiled by XLA.")
    parser.add_argument("--version", action="version", version=f"xlatrain {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    known = names()
    if arguments and not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        parser.error(f"there is no command {arguments[0]!r}; {hint}`xlatrain --help` lists all")
    for name in known:
        subparsers.add_parser(name, help=_help(name), add_help=False)
    parser.parse_args(arguments)  # --help, --version, or an error: a known subcommand has run above
    return 2


def names() -> list[str]:
    """The subcommands, in the order in which they are listed."""
    return sorted({*OWN, *_others()}, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def find(name: str) -> Command | None:
    """The subcommand of that name, or None."""
    if name in OWN:
        return importlib.import_module(f"xlatrain.cli.{name}")  # pyright: ignore[reportReturnType]  a module has both members
    other = _others().get(name)
    return None if other is None else other.load()


def _others() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _help(name: str) -> str:
    try:
        command = find(name)
    except ImportError as error:  # a command that cannot be loaded must not hide the others
        return f"(cannot be loaded: {error})"
    assert command is not None
    return command.HELP
