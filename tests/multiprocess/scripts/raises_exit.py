"""Process 1 ends by ``raise SystemExit``, which only a runner can see."""

from __future__ import annotations

import time

from xlatrain.cluster import distributed

world = distributed.initialize()
if world.process_id == 1:
    raise SystemExit(7)
time.sleep(600)
