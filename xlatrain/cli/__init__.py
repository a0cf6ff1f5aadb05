"""The command ``xlatrain``.

Each subcommand is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(args)``.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from xlatrain import __version__

COMMANDS = ("launch",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``xlatrain <subcommand> …``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="xlatrain", description="A JAX/XLA-first training backend.")
    parser.add_argument("--version", action="version", version=f"xlatrain {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS:
        command = importlib.import_module(f"xlatrain.cli.{name}")
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)
