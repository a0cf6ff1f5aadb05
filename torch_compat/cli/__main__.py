"""The commands ``xlatrain fit|validate|test|predict``: ``LightningCLI`` with model and data chosen by class path."""

from __future__ import annotations

import sys

from torch_compat.cli.cli import LightningCLI

_METHODS = LightningCLI.subcommands()


class CommandLine(LightningCLI):
    """A command line with only the subcommand that is run: each takes a parser of all signatures."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        chosen = sys.argv[1:2]
        return {name: skipped for name, skipped in _METHODS.items() if name in chosen} or _METHODS


if __name__ == "__main__":
    CommandLine(parser_kwargs={"prog": "xlatrain"})
