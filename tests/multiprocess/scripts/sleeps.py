"""Says who it is, and stays."""

import os
import time

print("pid", os.getpid(), flush=True)
time.sleep(600)
