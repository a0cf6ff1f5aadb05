"""A finding of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that a user may not expect.

    Attributes:
        level: ``"fault"``: runs fail or compute on something else than asked for; ``"warning"``: probably not wanted.
        topic: what it is about: a package, an environment variable, a platform.
        problem: what was found, and what was expected.
        remedy: the next step.
    """

    level: Literal["fault", "warning"]
    topic: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.problem}\n    → {self.remedy}"
