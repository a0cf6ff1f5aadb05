"""``python -m torch_compat.fabric run script.py``: stock's ``fabric run``."""

from __future__ import annotations

import sys

from torch_compat.fabric.cli import command

if __name__ == "__main__":
    command(sys.argv[1:])
