"""Process 1 ends in one of several ways, while process 0 would wait for it for a long time."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time

import jax

from xlatrain.cluster import distributed

world = distributed.initialize()
how = sys.argv[1]
jax.devices()
distributed.barrier("start")
if world.process_id == 1:
    if how == "well":
        try:
            sys.exit(7)
        except SystemExit:
            print("caught")
    else:
        atexit.register(print, "other exit handlers ran")
        if how != "interrupt":  # which the worker would get too
            folder = tempfile.TemporaryDirectory()
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
            worker.start()
            print("left:", folder.name, worker.pid)
        print("unfinished line", end="")
        if how == "status":
            sys.exit(7)
        if how == "message":
            sys.exit("the message")
        if how == "exception":
            raise RuntimeError("the exception")
        if how == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            try:
                time.sleep(600)
            finally:
                time.sleep(1)  # a busy process: process 0, which JAX's coordination service is in, would be gone long before
        if how == "leave":
            distributed.leave(9)
elif how != "well":
    time.sleep(600)
print("ended well")
