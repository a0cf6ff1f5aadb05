"""Processes that walk in step with each other, of which one comes to a bad end at its third step."""

from __future__ import annotations

import os
import signal
import sys
import time

from xlatrain import distributed, watch

how, victim = sys.argv[1], int(sys.argv[2])


def come_to_a_bad_end() -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raises":
        raise RuntimeError("the disk is full")
    if how == "hangs":
        time.sleep(600)


world = distributed.initialize()
with watch.armed(hang_after=1800):
    for step in range(6):
        watch.progress.mark("in its step", step)
        if step == 3 and world.process_id == victim:
            come_to_a_bad_end()
        watch.progress.mark("after its step")
        distributed.barrier("step", timeout=600)
print("finished", flush=True)
