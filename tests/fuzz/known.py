"""What is known to differ from stock Lightning without a word, or to fail: features and kinds of host state, with the reason.

A test fails when one of them no longer differs: it is then taken out here.
"""

from __future__ import annotations

STATES: dict[str, str] = {}
FEATURES: dict[str, str] = {
    "freezes_before_backward": "on_before_backward that freezes a parameter: the compiled step does it one batch late",
}
SEEDS: dict[int, str] = {
    7: FEATURES["freezes_before_backward"],
}
