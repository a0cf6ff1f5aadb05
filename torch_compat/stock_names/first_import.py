"""Imports that wait for the first use of a name, without a trace in the random streams."""

from __future__ import annotations

import importlib
import random
import sys
import types

from xlatrain.host.garbage import let_stay, uncollected


def first_import(name: str) -> types.ModuleType:
    """Import a module, and leave the generators of Python and numpy as they were.

    JAX and rich draw from these while they are imported. Stock imports its libraries at the top of a script; here that may be
    after the script has seeded.

    Garbage is not looked for meanwhile, nor among what was imported.
    """
    new = name not in sys.modules
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state()
    try:
        with uncollected():
            module = importlib.import_module(name)
            if new:
                let_stay()
            return module
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(legacy)
