"""Programs kept beside a plan, as the StableHLO that JAX gives the compiler: text, gzipped.

It is what a run's program can be compared with, and what other tools of XLA take. It is no compiled program: JAX does not load
one for devices that are not there.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "programs"


@dataclass(frozen=True)
class StoredProgram:
    """A program in a file.

    Attributes:
        file: its path, relative to the folder of the plan.
        sha256: of the text, hexadecimal.
    """

    file: str
    sha256: str


def text_of(lowered: Any) -> str:
    """The StableHLO of a lowered program, without places in source files: the same for the same program from other lines."""
    return lowered.as_text()


def digest(lowered: Any) -> str:
    """The sha256 of :func:`text_of`, hexadecimal."""
    return hashlib.sha256(text_of(lowered).encode()).hexdigest()


def store(lowered: Any, name: str, folder: Path) -> StoredProgram:
    """Write ``programs/NAME.stablehlo.mlir.gz`` below ``folder``, whole or not at all."""
    text = text_of(lowered).encode()
    path = folder / FOLDER / f"{name}.stablehlo.mlir.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(gzip.compress(text, mtime=0))
    temporary.replace(path)
    return StoredProgram(str(path.relative_to(folder)), hashlib.sha256(text).hexdigest())
