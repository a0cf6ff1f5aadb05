"""Import paths of our classes in configuration files: spelled as the user's script spells them.

A file written through ``lightning.pytorch`` names ``lightning.pytorch.callbacks.EarlyStopping``, so that stock Lightning
reads it as well, and a file that stock Lightning wrote can be compared with it line by line.
"""

from __future__ import annotations

import re
import sys

from torch_compat.stock_names.aliases import has_finder

_OURS = re.compile(r"(?<![\w./])torch_compat(?=\.\w)(?!\.fabric\b)")
_OUR_FABRIC = re.compile(r"(?<![\w./])torch_compat\.fabric(?=\.\w)")


def as_imported(text: str) -> str:
    """``text`` with the import paths in it that begin with our package's name spelled as Lightning's.

    Without :func:`torch_compat.install` they stay: Lightning's names would find the real package, or nothing.
    """
    if not has_finder():
        return text
    only_legacy = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return _OUR_FABRIC.sub("lightning.fabric", _OURS.sub("pytorch_lightning" if only_legacy else "lightning.pytorch", text))
