"""The fast path of a capture: the ops of a run are recorded, and the graph is made from the record.

The switch is here. Without it a capture traces each op as it runs, which gives the same graph and takes several times as long.
"""

from __future__ import annotations

import os

SWITCH = "XLATRAIN_RECORDED_CAPTURES"


def is_enabled() -> bool:
    """Whether ops may be recorded, and what an op becomes in a graph be copied: unless the user has set :data:`SWITCH` to 0."""
    return os.environ.get(SWITCH) != "0"
