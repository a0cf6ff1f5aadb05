"""``python -m xlatrain.cli``: the command where the console script is not installed."""

from __future__ import annotations

import sys

from xlatrain.cli import main

sys.exit(main())
