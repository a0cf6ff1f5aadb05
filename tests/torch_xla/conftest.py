"""Tests of the torch-xla path run in an environment of their own: ``make test-torch-xla``."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]
