"""What is known to differ from stock Lightning without a word, or to fail: features and kinds of host state, with the reason.

A test fails when one of them no longer differs: it is then taken out here.
"""

from __future__ import annotations

STATES: dict[str, str] = {}
FEATURES: dict[str, str] = {}
SEEDS: dict[int, str] = {}
