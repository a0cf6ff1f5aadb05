"""Writes ``docs/environment.md``: every environment variable of ours, from the table that `xlatrain doctor` reads."""

from __future__ import annotations

from pathlib import Path

from xlatrain.doctor.variables import OURS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "environment.md"

_HEAD = """# Environment variables

`xlatrain doctor` prints those that are set, and names values that are wrong. This page is written by
`python -m tools.environment_page`.

| variable | what it does |
|---|---|
"""
_TAIL = """
The Trainer's arguments come from variables too, as in Lightning: `PL_TRAINER_MAX_EPOCHS=3`;
`POSSIBLE_USER_WARNINGS=off` leaves out its warnings of what may be intended. `JAX_COMPILATION_CACHE_DIR`,
`JAX_PLATFORMS` and `XLA_FLAGS` are JAX's.
"""


def page() -> str:
    """The page's text."""
    rows = "".join(f"| `{name}` | {text.replace('|', '∣')} |\n" for name, text in sorted(OURS.items()))
    return _HEAD + rows + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
