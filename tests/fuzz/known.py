"""What is known to differ from stock Lightning without a word, or to fail: features and kinds of host state, with the reason.

A test fails when one of them no longer differs: it is then taken out here.
"""

from __future__ import annotations

STATES: dict[str, str] = {
    "warning_filters": "a capture catches warnings, so that the list of filters that it sees is another",
    "reloaded_module": "importlib.reload of a module of the user's between batches: a validation step does not see it",
    "trainer_optimizer_group_note": "an entry that a hook adds to a param group, and no optimizer knows",
}
FEATURES: dict[str, str] = {}
SEEDS: dict[int, str] = {10: STATES["warning_filters"]}
