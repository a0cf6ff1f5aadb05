"""Import aliases in spawn and forkserver children.

Such a child imports the user's script again before it runs anything of ours. What it gets first from its parent is the
pickled *preparation data* (``multiprocessing.spawn``); an entry in it that installs the aliases while it is unpickled is
early enough, reaches grandchildren, and leaves site-packages alone.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_ENTRY = "torch_compat"

# In the child `sys.path` is not the parent's yet, so the folder of this package comes along. At the end of the path it shadows
# nothing; the parent's path replaces it right afterwards.
_CHILD_CODE = """\
import sys
sys.path.append({folder!r})
from torch_compat.install import install
install()
"""


class _InstallWhenUnpickled:
    """Pickles to a call that installs the aliases; ``exec``, because nothing of ours can be imported before the path is set."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        folder = str(Path(__file__).resolve().parents[2])
        return exec, (_CHILD_CODE.format(folder=folder),)


def install_in_children() -> None:
    """Makes every spawn or forkserver child of this process install the aliases before it imports the main script."""
    original = spawn.get_preparation_data
    if getattr(original, "_installs_torch_compat", False):
        return

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if name == "ignore":  # For the forkserver's command line: a repr, not a pickle.
            return data
        # First, so that it is unpickled before anything else that might import a module.
        return {_ENTRY: _InstallWhenUnpickled(), **data}

    get_preparation_data._installs_torch_compat = True  # pyright: ignore[reportAttributeAccessIssue]
    spawn.get_preparation_data = get_preparation_data
    _preload_in_forkserver()


def _preload_in_forkserver() -> None:
    """Keeps the fork server itself, which has no preparation data, from importing the main script without aliases."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["torch_compat.install"])
