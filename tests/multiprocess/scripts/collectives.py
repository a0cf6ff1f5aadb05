"""Every collective of host objects, with its errors; and what ``initialize`` says the second time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from xlatrain.cluster import distributed

directory = Path(sys.argv[1])
world = distributed.initialize()
me = world.process_id
result: dict[str, Any] = {
    "world": [me, world.process_count, world.local_process_id, jax.process_index(), jax.process_count()],
    "again": distributed.initialize() == world,
    "broadcast": [distributed.broadcast_object({"from": me}, src) for src in range(world.process_count)],
    "gather": distributed.all_gather_object({"from": me}),
    "many": [distributed.broadcast_object(i * (me + 1)) for i in range(600)] == list(range(600)),
    "large": [len(part) for part in distributed.all_gather_object(bytes(3_000_000 + me))],
    "any": [distributed.any_process(me == 1), distributed.any_process(False)],
    "all": [distributed.all_processes(me == 1), distributed.all_processes(True)],
}
for _ in range(3):
    distributed.barrier("often")


def message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


result["source"] = message(lambda: distributed.broadcast_object(1, src=7))
result["another world"] = message(lambda: distributed.initialize("h:1", 5, 4))
if me == 0:
    result["barrier"] = message(lambda: distributed.barrier("saving", timeout=1))
distributed.all_gather_object(None)
if me == 1:
    result["broadcast alone"] = message(lambda: distributed.Channel("lonely").broadcast(1, timeout=1))
distributed.barrier("end")
(directory / f"{me}.json").write_text(json.dumps(result))
