"""The tally of a long drill: what was done and found so far, kept in a file after every piece."""

from __future__ import annotations

import collections
import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Tally:
    """What a drill has done.

    Attributes:
        done: attacks, so far; the next piece's seed.
        seconds: that they took.
        found: outcome → how often.
    """

    done: int = 0
    seconds: float = 0.0
    found: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, count: int, seconds: float, found: collections.Counter[str]) -> None:
        """Count a piece in."""
        self.done += count
        self.seconds = round(self.seconds + seconds, 1)
        self.found += found

    def __str__(self) -> str:
        found = ", ".join(f"{what}: {count:,}" for what, count in self.found.most_common())
        return f"{self.done:,} ({found}) in {self.seconds:,.0f} s"


def read(path: Path) -> dict[str, Tally]:
    """Drill → its tally; empty where no file is."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {name: Tally(one["done"], one["seconds"], collections.Counter(one["found"])) for name, one in kept.items()}


def write(path: Path, tallies: dict[str, Tally]) -> None:
    """Keep them: the old file or the new one is there, whenever this is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({name: vars(tally) for name, tally in tallies.items()}, indent=1) + "\n")
    os.replace(new, path)
