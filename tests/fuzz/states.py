"""Kinds of host state that a step may read, each with how it is made, read in a step, and changed by somebody else."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class State:
    """One kind of host state. ``N`` at the end of a name in the texts is replaced by a number of its own.

    Attributes:
        name: of the kind.
        read: an expression of the step's, a number: some value before ``write``, another after it.
        write: statements of a hook's; ``module`` and ``trainer`` are there.
        module: code at the top of the script.
        init: code in the module's constructor, with ``self``.
        undo: statements that end what ``write`` did to the whole process; ``MixinN`` for a base class of the module instead.
        library: code of a module ``libraryN`` of an installed package.
    """

    name: str
    read: str
    write: str
    module: str = ""
    init: str = ""
    undo: str = ""
    library: str = ""


def _of(file: str) -> dict[str, State]:
    texts = tomllib.loads(Path(__file__).with_name(file).read_text())
    return {name: State(name, **one) for name, one in texts.items()}


STATES = tuple({**_of("states.toml"), **_of("states_beyond.toml")}.values())
